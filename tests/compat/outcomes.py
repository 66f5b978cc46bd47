"""What checks of clients end with, and the table of all clients."""

from collections.abc import Iterable
from typing import NamedTuple

MAX_SHOWN = 240
"""Characters of a check's text."""


class Outcome(NamedTuple):
    """How a check ended: "pass", "fail", "skip", or "" for a line that is only shown. `number`: of equal checks."""

    result: str
    what: str
    number: int = 1


class Row(NamedTuple):
    """A client's row of the table."""

    client: str
    outcomes: list[Outcome]
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        print(f"{self.client:18} {' '.join(outcome.what.split())[:MAX_SHOWN]:40} {outcome.result}", flush=True)
        self.outcomes.append(outcome)

    def number_of(self, result: str) -> int:
        return sum(outcome.number for outcome in self.outcomes if outcome.result == result)


def table(rows: Iterable[Row]) -> str:
    """A line for each client, with the reasons of its checks that failed or were skipped."""
    lines = [f"{'client':18} passed  failed  skipped  seconds  reasons"]
    for row in rows:
        numbers = f"{row.number_of('pass'):6}  {row.number_of('fail'):6}  {row.number_of('skip'):7}  {row.seconds:7.0f}"
        reasons = [" ".join(one.what.split())[:MAX_SHOWN] for one in row.outcomes if one.result in ("fail", "skip")]
        lines.append(f"{row.client:18} {numbers}  {'; '.join(reasons)}".rstrip())
    return "\n".join(lines)
