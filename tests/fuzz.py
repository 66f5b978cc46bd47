"""Looks for examples that break a promise: every property test, with new seeds, until the time is over.

Each core runs the tests in its own order, again and again. A failing test is reported at once with its shrunk example
and then left out; .hypothesis/examples keeps it, and the printed line runs it again. One core compares whole systems
instead (tests/fleet/differential.py) and prints each failing seed; `--seed` runs one again. The exit status is 1 if
anything was found.
"""

import argparse
import itertools
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTEST = ("-m", "hypothesis", "--hypothesis-profile", "fuzz")
QUIET = ("-p", "no:terminal", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "addopts=")
"""The options in pyproject.toml include the omitted plugins'."""


class Explorer:
    """Runs the collected tests until `ends_at`, on the monotonic clock."""

    def __init__(self, ends_at: float) -> None:
        self._ends_at = ends_at
        self._found: set[str] = set()
        self._num_runs: Counter[str] = Counter()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            print(f"cannot collect {report.nodeid}:\n{report.longreprtext}", flush=True)  # noqa: T201

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("some tests could not be collected")
        order = random.SystemRandom()
        is_over = False
        while not is_over:
            left = [item for item in session.items if item.nodeid not in self._found]
            for item, following in itertools.pairwise([*order.sample(left, len(left)), None]):
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                self._num_runs[item.nodeid] += 1
                if is_over := time.monotonic() > self._ends_at:
                    break
            is_over = is_over or not left
        fewest = min((self._num_runs[item.nodeid] for item in session.items), default=0)
        print(  # noqa: T201
            f"one core: {self._num_runs.total()} runs of {len(session.items)} tests, each at least {fewest} times",
            flush=True,
        )
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._found.add(report.nodeid)
            again = f"{sys.executable} -m pytest {' '.join(PYTEST[2:])} '{report.nodeid}'"
            print(  # noqa: T201
                f"FOUND: {report.nodeid} ({report.when})\n{report.longreprtext}\n{report.capstdout}\nagain: {again}\n",
                flush=True,
            )


def explore(minutes: float, paths: list[str]) -> int:
    """On one core, in this process."""
    sys.path[0] = str(ROOT)  # as where pytest is started with python -m
    explorer = Explorer(time.monotonic() + 60 * minutes)
    return pytest.main([*PYTEST, *QUIET, *paths], plugins=[explorer])


def explore_systems(arguments: argparse.Namespace) -> int:
    """On one core."""
    sys.path.insert(0, str(ROOT / "tests" / "fleet"))
    import differential

    return differential.explore(arguments.minutes, arguments.seed, is_patient=arguments.patient)


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="10, or once where there is a --seed")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--systems", action="store_true", help="compare whole systems, and nothing else")
    parser.add_argument("--seed", type=int, help="of --systems: this one, over and over")
    parser.add_argument("--patient", action="store_true", help="of --systems: what stands still does so for up to 60 s")
    parser.add_argument("paths", nargs="*", help="tests, as pytest takes them; all, if none is named")
    arguments = parser.parse_args(given)
    if arguments.minutes is None:
        arguments.minutes = 10.0 if arguments.seed is None else 0.0
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.systems or arguments.seed is not None:
        sys.exit(explore_systems(arguments))
    if arguments.cores == 1:
        sys.exit(explore(arguments.minutes, arguments.paths))
    command = (sys.executable, __file__, "--cores", "1", "--minutes", str(arguments.minutes), *arguments.paths)
    commands = [command] * arguments.cores
    if not arguments.paths:
        commands[0] = (*command, "--systems")
    processes = [subprocess.Popen(command, cwd=ROOT) for command in commands]
    try:
        statuses = [process.wait() for process in processes]
    except KeyboardInterrupt:
        statuses = [process.wait() for process in processes]  # they were interrupted too
    found = any(statuses)
    print("something was found: see above" if found else "nothing was found")  # noqa: T201
    sys.exit(int(found))


if __name__ == "__main__":
    main()
