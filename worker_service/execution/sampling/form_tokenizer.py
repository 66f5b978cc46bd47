"""The tokenizer of outputs that have a form: what a form leaves no choice about is written as it is spelled.

Where only one text may follow, llguidance encodes that text and allows the first of its tokens alone. Encoded by the
model's own tokenizer, `<|im_end|>` in a choice would be the end of sequence, not ten characters; and a tokenizer that
normalizes makes other characters of some. So such text is encoded here, and with other tokens where the model's own do
not spell it. A grammar still reaches special tokens by their names.
"""

from llguidance import LLTokenizer

_SPECIAL = b"\xff"
"""What llguidance has before a special token's name; no text has this byte."""


def form_tokenizer(tokenizer_json: str, vocabulary_size: int, ends: list[int]) -> LLTokenizer:
    """Of a tokenizer.json's text, for so many tokens, of which `ends` are ends of sequence.

    Raises errors of llguidance's own kinds, for a tokenizer whose tokens are not bytes, say.
    """
    model = LLTokenizer(tokenizer_json, n_vocab=vocabulary_size, eos_token=ends, slices=[])
    return LLTokenizer(_PlainTokenizer(model), eos_token=ends)  # type: ignore[arg-type]


class _PlainTokenizer:
    """What llguidance asks of a tokenizer that is written in Python."""

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
        """The model's tokens; where these are not the text, the longest ones that are, from left to right."""
        token_ids = self._model.tokenize_str(text)
        if b"".join(self.tokens[token_id] for token_id in token_ids) == text.encode():
            return token_ids
        return self._model.greedy_tokenize(text)


def _bytes(model: LLTokenizer, token_id: int, is_special: bool) -> bytes:
    """Of a token in llguidance's trie, which shows a token without bytes by its number."""
    shown = model.decode_bytes([token_id])
    if is_special:
        return _SPECIAL + shown
    return b"" if shown == f"<[{token_id}]>".encode() else shown
