"""The load generator against systems that fit on a screen."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from bench.loads.drive import BenchError, Stream, drive
from bench.loads.load import Load, replayed, streams
from bench.systems.peer_vllm import tokens_of
from scheduler_service.simulation.trace import Arrival


class PairSystem:
    """Sends tokens two by two, and `extra` tokens beyond those asked for."""

    name = "pairs"
    start_seconds = 0.0

    def __init__(self, extra: int = 0) -> None:
        self.extra = extra
        self.prompts: list[Sequence[int]] = []
        self.num_under_way = self.most_under_way = 0

    def pids(self) -> list[int]:
        return []

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Stream]:
        yield self._stream

    async def _stream(self, prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
        self.prompts.append(prompt)
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        left = output_tokens + self.extra
        while left > 0:
            await asyncio.sleep(0)
            yield min(left, 2)
            left -= 2
        self.num_under_way -= 1


async def test_every_request_is_sent_once_and_no_more_at_a_time_than_asked_for() -> None:
    system, load = PairSystem(), streams(3, 5, concurrency=4, num_requests=10)
    prompts = load.prompts(100, 0)
    run = await drive(system, load, prompts)
    assert sorted(system.prompts) == sorted(prompts)
    assert system.most_under_way == 4
    assert [timeline.output_tokens for timeline in run.timelines] == [5] * 10
    assert [tokens for _, tokens in run.timelines[0].messages] == [2, 2, 1]


async def test_requests_of_a_trace_come_no_earlier_than_in_it() -> None:
    load: Load = replayed([Arrival(0.0, 1, 2), Arrival(0.05, 1, 2), Arrival(0.1, 1, 2)], 1.0)
    began = time.perf_counter()
    run = await drive(PairSystem(), load, load.prompts(100, 0))
    for arrival, timeline in zip(load.arrivals, run.timelines, strict=True):
        assert timeline.began >= began + arrival.at
    assert run.seconds >= 0.1


@pytest.mark.parametrize("extra", [1, -1])
async def test_a_system_that_sends_another_number_of_tokens_is_found_out(extra: int) -> None:
    load = streams(3, 5, concurrency=2, num_requests=2)
    with pytest.raises(BenchError, match=f"pairs sent {5 + extra} tokens where 5 were asked for"):
        await drive(PairSystem(extra), load, load.prompts(100, 0))


def test_tokens_of_an_event_stream_are_counted_by_their_ids() -> None:
    lines = [
        b'data: {"choices":[{"index":0,"text":"a","token_ids":[5]}]}\n',
        b"\n",
        b'data: {"choices":[{"index":0,"text":"","token_ids":[6,7]}]}\n',
        b'data: {"choices":[{"index":0,"text":"","token_ids":null}]}\n',
        b'data: {"choices":[],"usage":{"completion_tokens":3}}\n',
        b"data: [DONE]\n",
    ]
    assert [tokens_of(line) for line in lines] == [1, 0, 2, 0, 0, 0]
    with pytest.raises(BenchError, match="out of memory"):
        tokens_of(b'data: {"error":{"message":"out of memory"}}\n')
