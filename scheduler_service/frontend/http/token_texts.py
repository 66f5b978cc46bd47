"""The texts of single tokens, as log-probabilities over HTTP show them."""

from collections.abc import Iterable

from scheduler_service.frontend.checking.checks import require_tokenizer
from scheduler_service.frontend.model import ServedModel

TOKENS_AT_ONCE = 4096
"""Tokens that are decoded in one turn of the tokenizer's thread."""


class TokenTexts:
    """The texts of the tokens that answers have shown so far. Memory grows up to the vocabulary."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    async def learn(self, model: ServedModel, token_ids: Iterable[int]) -> None:
        """Decode tokens whose texts are unknown. Raises RequestError for a model without a tokenizer."""
        missing = [token_id for token_id in dict.fromkeys(token_ids) if token_id not in self._texts]
        for start in range(0, len(missing), TOKENS_AT_ONCE):
            part = missing[start : start + TOKENS_AT_ONCE]
            texts = await require_tokenizer("logprobs", model).decode_each(part)
            self._texts.update(zip(part, texts, strict=True))

    def __getitem__(self, token_id: int) -> str:
        return self._texts[token_id]
