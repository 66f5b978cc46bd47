"""The tokenizer of outputs with a form (grammar), which encodes text that the form prescribes.

If a form allows only one text, llguidance encodes the text and allows only its first token. With the model's own
tokenizer, `<|im_end|>` in a choice would become the end of sequence and not ten characters. A tokenizer that normalizes
text would change characters of the prescribed text. This tokenizer therefore encodes prescribed text itself. If the
model's tokens do not spell the text, this tokenizer uses other tokens. A grammar can still name special tokens.
"""

from llguidance import LLTokenizer

_SPECIAL = b"\xff"
"""The byte that llguidance puts before a special token's name. No text contains this byte."""


def form_tokenizer(tokenizer_json: str, vocabulary_size: int, ends: list[int]) -> LLTokenizer:
    """The tokenizer of a tokenizer.json with `vocabulary_size` tokens. `ends` are the end-of-sequence tokens.

    Raises llguidance's own exceptions, for example if the tokens of the tokenizer are not bytes.
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
        """The model's tokens of the text. If the model's tokens do not spell the text, the text is split into the
        longest matching tokens.
        """
        token_ids = self._model.tokenize_str(text)
        if b"".join(self.tokens[token_id] for token_id in token_ids) == text.encode():
            return token_ids
        return self._model.greedy_tokenize(text)


def _bytes(model: LLTokenizer, token_id: int, is_special: bool) -> bytes:
    """The bytes of a token in llguidance's trie. The library shows a token without bytes as its number."""
    shown = model.decode_bytes([token_id])
    if is_special:
        return _SPECIAL + shown
    return b"" if shown == f"<[{token_id}]>".encode() else shown
