import grpc
import pytest

from pagewire_common.calls.errors import RequestError
from scheduler_service.core import SequenceStatus
from scheduler_service.frontend.output.request_memory import UnreadOutput
from scheduler_service.frontend.output.streams import OutputDelta, OutputStream, Turns


async def test_what_a_slow_reader_has_not_taken_is_merged_and_nothing_is_lost() -> None:
    stream = OutputStream(2, Turns(), UnreadOutput(1 << 30))
    for token in range(1000):
        stream.put(OutputDelta(token % 2, str(token), [token]))
    for index in range(2):
        stream.put(OutputDelta(index, status=SequenceStatus.FINISHED_LENGTH_CAPPED, num_output_tokens=500))
    deltas = [delta async for delta in stream]
    assert [delta.index for delta in deltas] == [0, 1]
    for delta in deltas:
        assert delta.token_ids == list(range(delta.index, 1000, 2))
        assert delta.text == "".join(map(str, delta.token_ids))
        assert (delta.status, delta.num_output_tokens) == (SequenceStatus.FINISHED_LENGTH_CAPPED, 500)


async def test_an_error_ends_the_stream_after_what_came_before_it() -> None:
    stream = OutputStream(1, Turns(), UnreadOutput(1 << 30))
    stream.put(OutputDelta(0, "text"))
    stream.fail(RequestError(grpc.StatusCode.INTERNAL, "broken"))
    assert (await anext(stream)).text == "text"
    with pytest.raises(RequestError, match="broken"):
        await anext(stream)
