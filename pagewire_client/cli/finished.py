"""Prints the requests that ended last and their waiting times as a table."""

import sys
from collections.abc import Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table

from pagewire.v1 import admin_service_pb2 as pb

WIDTH = 150  # columns, if the output is no terminal


def print_requests(requests: Sequence[pb.FinishedRequest]) -> None:
    """Durations are in seconds. Preemptions are by recomputation / by swap."""
    table = Table("ended", "request", "tenant", "why")
    for heading in ("prompt", "cached", "output", "queued", "first token", "pauses", "longest", "all"):
        table.add_column(heading, justify="right")
    table.add_column("preempted", justify="right")
    table.add_column("moved", justify="right")
    for request in requests:
        metrics = request.metrics

        def seconds(name: str, metrics: object = metrics) -> str:
            return f"{getattr(metrics, name):.3f}" if metrics.HasField(name) else ""  # type: ignore[attr-defined]

        table.add_row(
            f"{datetime.fromtimestamp(request.end_time_ms / 1000):%H:%M:%S}",
            _printable(request.request_id),
            _printable(request.tenant),
            ", ".join(dict.fromkeys(request.finish_reasons)),
            f"{request.prompt_tokens:,}",
            f"{metrics.cached_tokens:,}",
            f"{request.output_tokens:,}",
            seconds("queued_seconds"),
            seconds("first_token_seconds"),
            seconds("mean_pause_seconds"),
            seconds("longest_pause_seconds"),
            f"{metrics.total_seconds:.3f}",
            f"{metrics.num_recompute_preemptions} / {metrics.num_swap_preemptions}",
            str(metrics.num_worker_changes),
        )
    width = None if sys.stdout.isatty() else WIDTH
    Console(file=sys.stdout, width=width, markup=False).print(table)


def _printable(text: str) -> str:
    """Other clients chose the ids, which may contain a terminal's control characters."""
    return "".join(character if character.isprintable() else "�" for character in text)
