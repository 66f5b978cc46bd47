"""The texts of single tokens. The text of each token is fetched from the scheduler once."""

from collections.abc import Iterable
from typing import Any

from pagewire.v1 import inference_service_pb2 as pb

MAX_SEPARATE = 4096
"""Maximum number of tokens of one scheduler call."""


class TokenTexts:
    """The texts of the served model's tokens that were requested so far."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    async def learn(self, stub: Any, metadata: Any, token_ids: Iterable[int]) -> None:
        """Fetch the texts of tokens. Raises grpc.aio.AioRpcError."""
        missing = [token_id for token_id in dict.fromkeys(token_ids) if token_id not in self._texts]
        for start in range(0, len(missing), MAX_SEPARATE):
            part = missing[start : start + MAX_SEPARATE]
            asked = pb.DetokenizeRequest(token_ids=part, separately=True)
            answer = await stub.Detokenize(asked, metadata=metadata)
            self._texts.update(zip(part, answer.texts, strict=True))

    def __getitem__(self, token_id: int) -> str:
        return self._texts[token_id]
