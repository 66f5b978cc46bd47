"""Random requests under hostile settings and disturbances, compared with the same requests alone on a roomy server.

A seed draws model, settings, requests and disturbances, but not when they meet: a failure may need several runs.
"""

import asyncio
import contextlib
import io
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from alone import Alone
from answers import Answer, difference
from disturbances import LONG, SHORT
from drawn_requests import Asked, draw_asked, without_priority
from drawn_settings import MODELS, WEIGHTS, draw_settings
from forked import ForkServers
from hostile_fleet import HostileFleet

from pagewire_client import local
from pagewire_common.serving.open_files import raise_open_files_limit

NUM_REQUESTS = 40
ROUND_SECONDS = 400.0
MAX_LINES = 30
"""Lines of the services' logs that are shown with a failure."""


class Totals(Counter[str]):
    """Counts of what was compared, and under which disturbances."""

    def __str__(self) -> str:
        return ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in sorted(self.items()))


async def run_seed(
    seed: int, alone: Alone, totals: Totals, *, num_requests: int = NUM_REQUESTS, is_patient: bool = False
) -> list[str]:
    """All failures: answers that differ from the request alone, and what is left over."""
    draw = random.Random(seed)
    (model,) = draw.choices(MODELS, WEIGHTS)
    dtype = draw.choice(model.dtypes)
    asked = [draw_asked(draw, model.kind) for _ in range(num_requests)]
    server = await asyncio.to_thread(alone.server, model, dtype)
    settings = draw_settings(draw, model, dtype, alone.adapters, asked)
    if not settings.has_priorities:
        asked = [without_priority(one) for one in asked]
    expected = [await alone.answer(server, without_priority(one)) for one in asked]
    seconds = LONG if is_patient else SHORT
    async with HostileFleet(server.model, settings, draw, seconds) as fleet, asyncio.timeout(ROUND_SECONDS):
        try:
            found = await fleet.answers(asked)
            wrong = [*differences(asked, found, expected), *await fleet.left_over(found)]
        except TimeoutError:
            wrong = [f"no end after {ROUND_SECONDS:g} s: {await fleet.state()}"]
        totals.update(fleet.counts)
    wrong += fleet.left_processes
    totals["requests"] += len(asked)
    totals["of_which_errors"] += sum(answer.error is not None for answer in expected)
    if wrong:
        wrong.insert(0, f"{model.name} in {dtype}; {settings}; {dict(fleet.counts)}")
    return wrong


def differences(asked: list[Asked], found: list[Answer], expected: list[Answer]) -> list[str]:
    both = zip(asked, found, expected, strict=True)
    return [f"{way}: {one}" for one, mine, theirs in both if (way := difference(mine, theirs))]


async def run_seeds(minutes: float, seed: int | None, *, is_patient: bool) -> bool:
    """Print failures and how to repeat them, of one `seed` again and again or of new ones. Returns whether there were
    any.
    """
    ends_at = time.monotonic() + 60 * minutes
    totals, num_found, is_over = Totals(), 0, False
    with tempfile.TemporaryDirectory() as folder, Alone(Path(folder)) as alone:
        while not is_over:
            drawn = random.SystemRandom().getrandbits(32) if seed is None else seed
            before, said = Counter(totals), io.StringIO()
            with contextlib.redirect_stderr(said):  # the services' warnings
                try:
                    wrong = await run_seed(drawn, alone, totals, is_patient=is_patient)
                except Exception:
                    wrong = [traceback.format_exc()]
            totals["seeds"] += 1
            is_over = time.monotonic() > ends_at
            print(f"differential seed {drawn}: {Totals(totals - before)}", flush=True)  # noqa: T201
            if wrong:
                num_found += 1
                lines = "\n  ".join([*wrong, *said.getvalue().splitlines()[-MAX_LINES:]])
                again = f"{sys.executable} tests/fuzz.py --seed {drawn}{' --patient' * is_patient}"
                print(f"FOUND: differential seed {drawn}\n  {lines}\nagain: {again}\n", flush=True)  # noqa: T201
    print(f"one core: {totals}; {num_found} seeds found something", flush=True)  # noqa: T201
    return num_found > 0


def explore(minutes: float, seed: int | None = None, *, is_patient: bool = False) -> int:
    """On one core, in this process and its children; returns the exit status."""
    raise_open_files_limit()
    os.environ |= {"OMP_NUM_THREADS": "1"}
    servers = ForkServers()
    local.start_process = servers.start  # type: ignore[assignment]
    try:
        return int(asyncio.run(run_seeds(minutes, seed, is_patient=is_patient)))
    finally:
        servers.close()
