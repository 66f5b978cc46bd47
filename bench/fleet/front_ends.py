"""Measures the CPU time of front ends with few and many streams, over one and many connections."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.fleet import feeding
from bench.fleet.sleeping_servicer import MAX_NUM_SEQS
from pagewire.v1 import engine_service_pb2 as pb
from scheduler_service.engine.calls.calls import Outbox

NUM_ROUNDS = 300
FIRST_TOKEN_ID, FIRST_OUTPUT = 30_000, 1_000_000
"""Numbers of a scheduler that has run for a long time. Smaller ones take fewer bytes."""


@dataclass(frozen=True, slots=True)
class Case:
    """Streams on one worker that sleeps for 20 ms in each step."""

    streams: int
    front_ends: int = 1
    connections: int | None = None


CASES = (Case(1), Case(8), Case(256), Case(256, 2, 1), Case(256, 2, 32))
"""The last two have two front ends, with 1 connection (as from a proxy) and with 32."""


@dataclass(frozen=True, slots=True)
class Cost:
    streams: int
    front_ends: int
    connections: int
    messages_per_second: float
    """Messages of all streams together. With steps of 20 ms, each stream should receive 50 tokens per second."""
    engine_us: float
    front_ends_us: float
    """CPU microseconds per token, of all front ends."""
    front_ends_cores: float
    busiest_percent: float
    """The busiest front end's share of the CPU time of all."""


@dataclass(frozen=True, slots=True)
class Wire:
    """The engine's message to a front end with the tokens of one step of 256 sequences."""

    num_bytes: int
    encode_us: float
    decode_us: float


def run(model: Path, tell: Callable[[str], None]) -> list[Cost]:
    return [_measure(case, model, tell) for case in CASES]


def _measure(case: Case, model: Path, tell: Callable[[str], None]) -> Cost:
    arguments = ["--frontends", str(case.front_ends)]
    connections = case.connections or -(-case.streams // 64)
    seen = feeding.measure(1, model, arguments, num_streams=case.streams, num_connections=connections)
    cost = Cost(
        case.streams,
        case.front_ends,
        connections,
        seen.messages_per_second,
        seen.engine_us,
        seen.front_ends_us,
        seen.front_ends_cores,
        seen.busiest_percent,
    )
    tell(str(cost))
    return cost


def wire() -> Wire:
    """Encode and decode the message of one step. Each time is the fastest of many rounds."""
    outbox = Outbox()
    encode_us, decode_us, data = [], [], b""
    for _ in range(NUM_ROUNDS):
        outbox.outputs += range(FIRST_OUTPUT, FIRST_OUTPUT + MAX_NUM_SEQS)
        outbox.token_ids += range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + MAX_NUM_SEQS)
        began = time.perf_counter()
        data = outbox.take().SerializeToString()
        encoded = time.perf_counter()
        message = pb.AttachResponse.FromString(data)
        rows = list(zip(message.outputs, message.token_ids, strict=True))
        decode_us.append(1e6 * (time.perf_counter() - encoded))
        encode_us.append(1e6 * (encoded - began))
        assert len(rows) == MAX_NUM_SEQS
    return Wire(len(data), min(encode_us), min(decode_us))
