import asyncio
from typing import Any

import grpc
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import PatientWriter, RequestError

MESSAGE = pb.GenerateResponse()


class Reader:
    """A context whose client reads while it `reads`."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()

    async def write(self, message: Any) -> None:
        await self.reads.wait()


async def test_a_client_that_reads_nothing_for_too_long_ends_its_call() -> None:
    writer = PatientWriter(Reader(), 0.01)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"the client read nothing for 0\.01 s") as error:
        await writer.write(MESSAGE)
    assert error.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not asyncio.current_task().cancelling()  # type: ignore[union-attr]


async def test_a_call_may_last_longer_than_any_of_its_writes() -> None:
    reader = Reader()
    reader.reads.set()
    writer = PatientWriter(reader, 0.01)  # type: ignore[arg-type]
    for _ in range(3):
        await writer.write(MESSAGE)
        await asyncio.sleep(0.02)
    writer.close()


async def test_a_cancelled_call_stays_cancelled() -> None:
    writing = asyncio.create_task(PatientWriter(Reader(), 60.0).write(MESSAGE))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing


async def test_a_client_that_goes_away_during_a_write_is_no_failure_of_the_server() -> None:
    class Gone:
        async def write(self, message: Any) -> None:
            raise grpc.aio.InternalError('Failed "execute_batch"')

    with pytest.raises(RequestError, match="the client is gone") as error:
        await PatientWriter(Gone(), 60.0).write(MESSAGE)  # type: ignore[arg-type]
    assert error.value.code is grpc.StatusCode.CANCELLED


async def test_a_write_that_is_given_up_ends_with_the_reason_and_without_one_under_way_nothing_happens() -> None:
    reader, gone = Reader(), RequestError(grpc.StatusCode.ABORTED, "another call goes on")
    writer = PatientWriter(reader, 60.0)  # type: ignore[arg-type]
    writer.give_up(gone)
    asyncio.get_running_loop().call_soon(writer.give_up, gone)
    with pytest.raises(RequestError, match="another call goes on") as error:
        await writer.write(MESSAGE)
    assert error.value.code is grpc.StatusCode.ABORTED
    writer.close()
