"""Request traces: each request's arrival time, prompt length and output length."""

import csv
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
IMAGES = "NumImages"
"""A column of the trace with images, which other traces lack."""


class TraceError(ValueError):
    """The trace cannot be used; the message names the line."""


class Arrival(NamedTuple):
    """One request; `at` in seconds after the first. Prompts of a `conversation` share a prefix. All images differ."""

    at: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    priority: int = 0
    conversation: int | None = None
    num_images: int = 0


def read_trace(path: Path, *, speedup: float = 1.0, limit: int | None = None) -> list[Arrival]:
    """Read a CSV file with the columns of the Azure LLM inference traces (Patel et al., "Splitwise", ISCA 2024).

    `speedup` divides the times; `limit` is the number of requests to read. Raises TraceError.
    """
    arrivals: list[Arrival] = []
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if not set(COLUMNS) <= set(reader.fieldnames or ()):
                raise TraceError(f"{path}, line 1: the columns {', '.join(COLUMNS)} are needed")
            first: datetime | None = None
            for row in reader:
                if len(arrivals) == limit:
                    break
                try:
                    # Timestamps have seven digits of a second, Python's datetime reads six.
                    time = datetime.fromisoformat(row["TIMESTAMP"][:26])
                    prompt_tokens, output_tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
                    num_images = int(row.get(IMAGES) or 0)
                except (TypeError, ValueError) as error:
                    raise TraceError(f"{path}, line {reader.line_num}: {error}") from error
                first = first or time
                at = (time - first).total_seconds() / speedup
                if min(prompt_tokens, output_tokens) < 1 or num_images < 0 or (arrivals and at < arrivals[-1].at):
                    raise TraceError(
                        f"{path}, line {reader.line_num}: token counts must be at least 1, numbers of images at "
                        "least 0, and times must not go back"
                    )
                arrivals.append(Arrival(at, prompt_tokens, output_tokens, num_images=num_images))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error
    if not arrivals:
        raise TraceError(f"{path} has no requests")
    return arrivals


def longest_sequence(arrivals: Sequence[Arrival]) -> int:
    return max(arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals)
