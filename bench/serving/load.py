"""Sends a load to a running server, over gRPC or HTTP, and prints rates and percentiles. The last line is JSON.

pagewire bench load --target HOST:PORT --rate 4 --requests 100 --prompt-tokens 64-512 --output-tokens 128
pagewire bench load --http http://HOST:PORT --trace FILE.csv --speedup 2 --plot OUT.png

Prompts are random tokens, outputs ignore end-of-sequence tokens, and arrivals without a trace are a Poisson process, or
all at once without --rate. The first refused request ends the run. PAGEWIRE_CLIENT_API_KEY is the API key.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import grpc
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.loads.drive import BenchError, Stream, drive
from bench.loads.figures import Run, percentile, rate
from bench.loads.load import Load, capped
from bench.systems.pagewire_system import grpc_stream
from pagewire_client import Client
from pagewire_client.cli.flag_values import access, folder, take_credentials
from pagewire_common.connection.tls import TlsFolder
from pagewire_common.start_error import StartError
from scheduler_service.simulation.trace import Arrival, read_trace

PERCENTS = (50, 90, 99)


class Server:
    """A running server. `ended` is called after each request."""

    start_seconds = 0.0

    def __init__(self, arguments: argparse.Namespace, ended: Callable[[], object]) -> None:
        self.name, self._ended = arguments.http or arguments.target, ended
        self._http, self._access = arguments.http, access(arguments)

    def pids(self) -> Sequence[int]:
        return ()

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Stream]:
        async with self._over_http() if self._http else self._over_grpc() as stream:

            async def counted(prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
                async for tokens in stream(prompt, output_tokens):
                    yield tokens
                self._ended()

            yield counted

    @asynccontextmanager
    async def _over_grpc(self) -> AsyncIterator[Stream]:
        async with Client(self.name, retry_for=0, **self._access) as client:
            yield await grpc_stream(client)

    @asynccontextmanager
    async def _over_http(self) -> AsyncIterator[Stream]:
        headers = {"authorization": f"Bearer {self._access['api_key']}"}
        tls = self._access["tls"]
        security = TlsFolder(tls).client_context() if tls is not None else True
        connector, timeout = aiohttp.TCPConnector(limit=0, ssl=security), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(self.name, connector=connector, timeout=timeout, headers=headers) as session:
            async with session.get("/v1/models") as response:
                await self._check(response)
                model = (await response.json())["data"][0]["id"]

            async def stream(prompt: Sequence[int], output_tokens: int) -> AsyncIterator[int]:
                """Each event counts as one token; tokens beyond these are counted with `usage` at the end."""
                body = {"model": model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0}
                body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
                counted = 0
                async with session.post("/v1/completions", json=body) as response:
                    await self._check(response)
                    async for line in response.content:
                        data = line.removeprefix(b"data:").strip()
                        if not data.startswith(b"{"):
                            continue
                        event = json.loads(data)
                        if error := event.get("error"):
                            raise BenchError(f"{self.name} ended a stream: {error['message']}")
                        usage = event.get("usage")
                        tokens = usage["completion_tokens"] - counted if usage else int(counted < output_tokens)
                        if tokens:
                            counted += tokens
                            yield tokens

            yield stream

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        if response.status != 200:
            raise BenchError(f"{self.name} answered {response.status}: {await response.text()}")


def arrivals_of(arguments: argparse.Namespace) -> list[Arrival]:
    """Raises TraceError."""
    if arguments.trace:
        return read_trace(arguments.trace, speedup=arguments.speedup, limit=arguments.requests)
    draw, at, arrivals = random.Random(arguments.seed), 0.0, []
    for _ in range(arguments.requests or 100):
        arrivals.append(Arrival(at, draw.randint(*arguments.prompt_tokens), draw.randint(*arguments.output_tokens)))
        at += draw.expovariate(arguments.rate) if arguments.rate else 0.0
    return arrivals


def figures_of(run: Run) -> dict[str, Any]:
    """Rates, and percentiles in seconds."""
    lines = run.timelines
    values = {
        "ttft": [one.ttft for one in lines],
        "tpot": [tpot for one in lines if (tpot := one.tpot) is not None],
        "itl": [pause for one in lines for pause in one.pauses()],
        "e2e": [one.messages[-1][0] - one.began for one in lines],
    }
    return {
        "requests": len(lines),
        "seconds": run.seconds,
        "requests_per_second": len(lines) / run.seconds,
        "output_tokens_per_second": rate([run]),
        "prompt_tokens": sum(one.prompt_tokens for one in lines),
        "output_tokens": sum(one.output_tokens for one in lines),
    } | {
        name: {f"p{percent}": percentile(some, percent) for percent in PERCENTS}
        for name, some in values.items()
        if some
    }


def make_parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--target", metavar="HOST:PORT", default="127.0.0.1:50051", help="gRPC (default %(default)s)")
    where.add_argument("--http", metavar="URL", type=_url, help="completions over HTTP, such as http://127.0.0.1:8000")
    parser.add_argument("--tls", metavar="FOLDER", type=folder, help="connect by TLS with the folder's ca.crt")
    parser.add_argument("--trace", metavar="CSV", type=Path, help="TIMESTAMP, ContextTokens, GeneratedTokens")
    parser.add_argument("--speedup", type=_positive, default=1.0, help="divides the trace's times (default 1)")
    parser.add_argument("--requests", type=_count, help="number of requests (default 100, or the whole trace)")
    parser.add_argument("--rate", type=_positive, help="mean requests per second (default: all at once)")
    parser.add_argument(
        "--concurrency", type=_count, default=4096, help="most requests in flight (default %(default)s)"
    )
    parser.add_argument("--prompt-tokens", type=_range, default=(128, 128), metavar="N or N-M", help="default 128")
    parser.add_argument("--output-tokens", type=_range, default=(128, 128), metavar="N or N-M", help="default 128")
    parser.add_argument(
        "--context", type=_context, default=2048, help="longest request; longer ones are cut (default 2048)"
    )
    parser.add_argument("--vocabulary", type=_count, default=256, help="prompts draw ids below this (default 256)")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, arrivals and prompts (default 0)")
    parser.add_argument("--plot", metavar="OUT.png", type=Path, help="draw TTFT and time per output token")
    return parser


def _positive(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _context(text: str) -> int:
    if (value := _count(text)) < 2:
        raise argparse.ArgumentTypeError("a request has a prompt and an output, so at least 2 tokens")
    return value


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path not in ("", "/"):
        raise argparse.ArgumentTypeError(f"{text!r} must be http://HOST:PORT or https://HOST:PORT, without a path")
    return text


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    found = _count(least), _count(most or least)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text}: the first number is above the second")
    return found


def save_plot(run: Run, path: Path) -> None:
    """Draw the shares of requests by TTFT and by mean time per token."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), dpi=150, layout="constrained")
    for axes, title, values in zip(
        figure.subplots(1, 2),
        ("time to first token", "time per output token"),
        ([one.ttft for one in run.timelines], [tpot for one in run.timelines if (tpot := one.tpot) is not None]),
        strict=True,
    ):
        axes.step(sorted(values), [(place + 1) / len(values) for place in range(len(values))], where="post")
        axes.set_xlabel(f"{title}, seconds")
        axes.set_ylabel("share of requests")
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> None:
    program = sys.argv[0]
    arguments = make_parser(program).parse_args()
    take_credentials(arguments)
    try:
        if arguments.plot:
            from scheduler_service.simulation.plot import check

            check(arguments.plot)
        arrivals = [capped(one, arguments.context) for one in arrivals_of(arguments)]
        load = Load("load", "load", arrivals, arguments.concurrency)
        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("requests", total=len(arrivals))
            server = Server(arguments, lambda: bar.advance(task))
            run = asyncio.run(drive(server, load, load.prompts(arguments.vocabulary, arguments.seed)))
        if arguments.plot:
            save_plot(run, arguments.plot)
    except ModuleNotFoundError as error:
        sys.exit(f"{program}: --plot needs {error.name}, which pip install -e '.[plot]' installs")
    except (ValueError, BenchError, StartError, OSError, aiohttp.ClientError) as error:
        sys.exit(f"{program}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{program}: interrupted")
    except grpc.aio.AioRpcError as error:
        sys.exit(f"{program}: {error.code().name}: {error.details()}")
    figures = figures_of(run)
    table = Table("seconds", *(f"p{percent}" for percent in PERCENTS))
    for name, row in figures.items():
        if isinstance(row, dict):
            table.add_row(name, *(f"{value:.3f}" for value in row.values()))
    Console(file=sys.stdout).print(table)
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
