"""A load generator of little CPU time, which keeps streams running on one scheduler: python -m bench.fleet.raw_load.

The streams are distributed over several connections. The counters that child.py reports are totals since the start. The
process ends if a stream fails.
"""

import argparse
import asyncio
import random
import time

from bench.fleet.child import report
from bench.fleet.http2 import Connection, ProtocolError
from pagewire.v1 import inference_service_pb2 as pb

PATH = "/pagewire.v1.InferenceService/Generate"
STREAMS_A_CONNECTION = 64
PROMPT_TOKENS = 64
OUTPUT_TOKENS = (128, 384)
"""Bounds of the random lengths, which keep streams from ending at the same time."""


class RawLoad:
    """Keeps `num_streams` streams running."""

    def __init__(self, num_streams: int, num_connections: int | None = None) -> None:
        self.num_streams = num_streams
        self.num_connections = num_connections or -(-num_streams // STREAMS_A_CONNECTION)
        self.num_completed = 0
        self.num_tokens = 0
        """Tokens of completed streams."""
        self.connections: list[Connection] = []
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._draw = random.Random(0)

    async def run(self, target: str) -> None:
        """Run for ever. Raises ProtocolError, ValueError or OSError if a stream or a connection fails."""
        host, _, port = target.rpartition(":")
        loop = asyncio.get_running_loop()
        for _ in range(self.num_connections):
            _, connection = await loop.create_connection(
                lambda: Connection(PATH, self._ended, self._failed), host, int(port)
            )
            self.connections.append(connection)
        for number in range(self.num_streams):
            self.connections[number % len(self.connections)].begin(self._request())
        await self.failure

    def counters(self) -> dict[str, float]:
        return {
            "at": time.monotonic(),
            "num_completed": self.num_completed,
            "num_messages": sum(connection.num_messages for connection in self.connections),
            "num_tokens": self.num_tokens,
            "cpu_seconds": time.process_time(),
        }

    def _request(self) -> bytes:
        draw = self._draw
        output_tokens = draw.randint(*OUTPUT_TOKENS)
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[draw.randrange(1_000, 40_000) for _ in range(PROMPT_TOKENS)]),
            sampling=pb.SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
        )
        return request.SerializeToString()

    def _ended(self, connection: Connection, last_message: bytes, trailers: bytes) -> None:
        response = pb.GenerateResponse.FromString(last_message)
        if response.finish_reason != pb.FINISH_REASON_LENGTH:
            self._failed(ProtocolError(f"a stream ended otherwise than by its length: {trailers!r}"))
            return
        self.num_completed += 1
        self.num_tokens += response.usage.output_tokens
        connection.begin(self._request())

    def _failed(self, error: Exception) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)


async def main(target: str, num_streams: int, num_connections: int | None) -> None:
    load = RawLoad(num_streams, num_connections)
    either = [asyncio.create_task(load.run(target)), asyncio.create_task(report(load.counters))]
    done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    for task in either:
        task.cancel()
    for task in done:
        task.result()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--connections", type=int, help=f"default: one for every {STREAMS_A_CONNECTION} streams")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.target, arguments.streams, arguments.connections))
