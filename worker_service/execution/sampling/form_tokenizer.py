"""The tokenizer of outputs that have a form; it spells text that the form leaves no choice about.

If only one text may follow, llguidance encodes that text and allows its first token only. The model's own tokenizer
would encode `<|im_end|>` in a choice as the end of sequence, not as ten characters; a tokenizer that normalizes would
change characters. So such text is encoded here, with other tokens if the model's tokens do not spell it. A grammar
still reaches special tokens by their names.
"""

from llguidance import LLTokenizer

_SPECIAL = b"\xff"
"""The byte that llguidance puts before a special token's name; no text has this byte."""


def form_tokenizer(tokenizer_json: str, vocabulary_size: int, ends: list[int]) -> LLTokenizer:
    """The tokenizer of a tokenizer.json's text with this number of tokens; `ends` are the ends of sequence.

    Raises errors of llguidance's own kinds, for example for a tokenizer whose tokens are not bytes.
    """
    model = LLTokenizer(tokenizer_json, n_vocab=vocabulary_size, eos_token=ends, slices=[])
    return LLTokenizer(_PlainTokenizer(model), eos_token=ends)  # type: ignore[arg-type]


class _PlainTokenizer:
    """The interface that llguidance requires of a tokenizer in Python."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, model: LLTokenizer) -> None:
        self._model = model
        self.eos_token_id = model.eos_token
        token_ids = range(model.vocab_size)
        self.special_token_ids = [token_id for token_id in token_ids if model.is_special_token(token_id)]
        special = frozenset(self.special_token_ids)
        self.tokens = [_bytes(model, token_id, token_id in special) for token_id in token_ids]

    def __call__(self, text: str) -> list[int]:
        """The model's tokens. If they do not spell the text, the longest tokens that do, from left to right."""
        token_ids = self._model.tokenize_str(text)
        if b"".join(self.tokens[token_id] for token_id in token_ids) == text.encode():
            return token_ids
        return self._model.greedy_tokenize(text)


def _bytes(model: LLTokenizer, token_id: int, is_special: bool) -> bytes:
    """The bytes of a token in llguidance's trie, which represents a token without bytes by its number."""
    shown = model.decode_bytes([token_id])
    if is_special:
        return _SPECIAL + shown
    return b"" if shown == f"<[{token_id}]>".encode() else shown
