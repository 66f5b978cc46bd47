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


@pytest.mark.parametrize("letter", ["x", " ", "\n", "%", "é", "\U0001f600"])
async def test_a_sentence_with_a_clients_own_words_is_cut_to_what_fits_into_a_status(letter: str) -> None:
    """gRPC ends calls whose status is larger with one of its own, RESOURCE_EXHAUSTED: so an invalid request seemed."""

    async def find(request: Any, context: Any) -> None:
        raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, f"there is no worker {letter * int(request)}")

    handlers = {"Find": grpc.unary_unary_rpc_method_handler(find)}
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("pagewire.v1.Some", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for number in (10, 1_000_000):
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await channel.unary_unary("/pagewire.v1.Some/Find")(str(number).encode())
                assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                details = error.value.details() or ""
                assert details.startswith("there is no worker " + 10 * letter)
                assert details.endswith("…") == (number > 10)
    finally:
        await server.stop(None)
