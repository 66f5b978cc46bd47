"""Measures the scheduler's CPU time per token with and without spans of every request.

One worker that sleeps for 20 ms in each step serves 256 streams of 128 to 384 tokens. A collector discards the spans.
Each round measures without, with, and without spans; both measurements without spans give the error.
"""

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from bench.fleet import feeding
from bench.fleet.sleeping_servicer import MAX_NUM_SEQS

NUM_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU microseconds of engine and front end per token, the lowest of all rounds: other programs only add time."""

    without_us: float
    with_us: float
    with_to_without: float
    without_to_without: float


class _Nowhere(grpc.GenericRpcHandler):
    """A collector that answers every call with an empty message."""

    def service(self, _: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")  # noqa: ARG005


@contextmanager
def _collector() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[_Nowhere()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None)


def run(model: Path, tell: Callable[[str], None]) -> Cost:
    def us_a_token(*arguments: str) -> float:
        seen = feeding.measure(1, model, arguments, num_streams=MAX_NUM_SEQS)
        return seen.engine_us + seen.front_ends_us

    rounds = []
    with _collector() as endpoint:
        for number in range(NUM_ROUNDS):
            rounds.append((us_a_token(), us_a_token("--otlp-traces-endpoint", endpoint), us_a_token()))
            tell("round {}: {:.1f} µs a token without spans, {:.1f} with, {:.1f} without".format(number, *rounds[-1]))
    before, spans, after = map(min, zip(*rounds, strict=True))
    return Cost(before, spans, spans / before, after / before)
