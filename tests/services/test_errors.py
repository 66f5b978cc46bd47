import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from pagewire_common.errors import ErrorInterceptor, RequestError


class Deaf:
    """A context whose client cannot be told anything any more."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise grpc.aio.InternalError("Failed grpc_call_start_batch")


async def test_an_error_that_nobody_can_be_told_cancels_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    """As a client's that reads nothing: what it has not read is in the way of the status."""

    async def stall(request: Any, context: Any) -> None:
        raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, "the client read nothing for 60 s")

    async def find(_: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(stall)

    handler = await ErrorInterceptor().intercept_service(find, SimpleNamespace(method="/pagewire.v1.Some/Method"))  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        await handler.unary_unary(None, Deaf())
    assert "the client read nothing for 60 s" in capsys.readouterr().out
