"""The tokenizer with which llguidance encodes text that an output form (grammar) prescribes.

If only one continuation is allowed, llguidance encodes it and allows its first token. The model's own tokenizer would
encode `<|im_end|>` in a choice as the special token, and might normalise text. This tokenizer checks that the tokens
spell the text, and otherwise splits the text into other tokens. A grammar can still name special tokens.

llguidance counts every added token in angle brackets as special, and so keeps it out of text. A token such as
`<tool_call>`, which the tokenizer's file does not call special, is text here: the model writes its calls with it."""

import json

from llguidance import LLTokenizer

_SPECIAL = b"\xff"
"""The byte before the name of a special token in llguidance's trie. UTF-8 never contains this byte."""


def form_tokenizer(tokenizer_json: str, vocabulary_size: int, ends: list[int]) -> LLTokenizer:
    """ends: ids of end-of-sequence tokens. Raises exceptions of llguidance's own types."""
    model = LLTokenizer(tokenizer_json, n_vocab=vocabulary_size, eos_token=ends, slices=[])
    added = json.loads(tokenizer_json).get("added_tokens") or ()
    text_ids = frozenset(token["id"] for token in added if not token["special"]).difference(ends)
    return LLTokenizer(_PlainTokenizer(model, text_ids), eos_token=ends)  # type: ignore[arg-type]


class _PlainTokenizer:
    """Has the attributes that llguidance requires of tokenizers written in Python. `text_ids`: tokens that are text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, model: LLTokenizer, text_ids: frozenset[int]) -> None:
        self._model = model
        self.eos_token_id = model.eos_token
        token_ids = range(model.vocab_size)
        special = frozenset(token_id for token_id in token_ids if model.is_special_token(token_id)) - text_ids
        self.special_token_ids = sorted(special)
        self.tokens = [_bytes(model, token_id, token_id in special) for token_id in token_ids]

    def __call__(self, text: str) -> list[int]:
        """Encode with the model's tokenizer or, if the tokens do not spell the text, with the longest matching
        tokens."""
        token_ids = self._model.tokenize_str(text)
        if b"".join(self.tokens[token_id] for token_id in token_ids) == text.encode():
            return token_ids
        return self._model.greedy_tokenize(text)


def _bytes(model: LLTokenizer, token_id: int, is_special: bool) -> bytes:
    """A token's bytes in llguidance's trie. For a token without bytes, `decode_bytes` returns its id as <[7]>."""
    shown = model.decode_bytes([token_id])
    if is_special:
        return _SPECIAL + shown
    return b"" if shown == f"<[{token_id}]>".encode() else shown
