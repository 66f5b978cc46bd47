"""The keeper starts an engine and its front ends again, and ends with them.

In place of engines and front ends, shell scripts run. They say that they are ready on their standard input.
"""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from scheduler_service.processes import child, keeper
from scheduler_service.processes.keeper import Keeper

READY = "echo + >&0; "
FOR_EVER = "exec sleep 1000"


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Keep shell scripts. `when` are functions to call, one after the other, when a script says that it is ready."""
    monkeypatch.setattr(keeper, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(keeper, "END_SECONDS", 0.2)

    def start(script: str, pipe: int) -> child.Process:
        return subprocess.Popen(["sh", "-c", script], stdin=pipe)

    def run(engine: str, front_end: str = READY + FOR_EVER, *, when: tuple[Callable[[], None], ...] = ()) -> int:
        left = list(when)
        read = child.Child.read

        def reading(one: child.Child) -> int | None:
            status = read(one)
            if status is None and left:
                left.pop(0)()
            return status

        monkeypatch.setattr(child.Child, "read", reading)
        monkeypatch.setattr(child, "fork", lambda _: lambda pipe: start(engine, pipe))
        monkeypatch.setattr(child, "start_front_end", lambda arguments, pipe: start(front_end, pipe))
        return Keeper(lambda pipe: None, [], 2).run()

    return run


def test_an_engine_that_cannot_start_ends_the_scheduler_with_its_status(keep: Callable[..., int]) -> None:
    assert keep("exit 3") == 3


def test_an_engine_that_ends_later_is_started_again_until_it_ends_well(
    keep: Callable[..., int], tmp_path: Path
) -> None:
    script = f"{READY} echo >> {tmp_path}/starts; test $(wc -l < {tmp_path}/starts) = 3 || kill -9 $$"
    with capture_logs() as logs:
        assert keep(script) == 0
    assert [log["status"] for log in logs if log["event"].startswith("the engine ended")] == [-9, -9]


def test_a_front_end_that_ends_is_started_again(keep: Callable[..., int], tmp_path: Path) -> None:
    """At the fifth start the engine ends, which reads a line from a pipe."""
    os.mkfifo(tmp_path / "engine")
    front_end = (
        f"echo >> {tmp_path}/starts; test $(wc -l < {tmp_path}/starts) -lt 5 || echo > {tmp_path}/engine; exit 1"
    )
    assert keep(f"{READY} read line < {tmp_path}/engine", front_end) == 0


def test_a_signal_reaches_the_engine_and_ends_what_does_not_end(keep: Callable[..., int]) -> None:
    def stop() -> None:
        signal.raise_signal(signal.SIGTERM)

    with capture_logs() as logs:
        assert keep(READY + FOR_EVER, when=(stop,)) == 0
    assert not logs


def test_a_signal_between_two_engines_ends_the_scheduler(
    keep: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next engine would start only after a minute."""
    monkeypatch.setattr(keeper, "FIRST_PAUSE_SECONDS", 60.0)
    monkeypatch.setattr(keeper, "LAST_PAUSE_SECONDS", 60.0)
    end = keeper.Slot.end

    def stop(slot: keeper.Slot, now: float) -> None:
        end(slot, now)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(keeper.Slot, "end", stop)
    assert keep(READY + "exit 1") == 0


def test_front_ends_are_replaced_when_their_successors_are_ready(keep: Callable[..., int], tmp_path: Path) -> None:
    """The engine ends when two front ends have been told to drain."""
    os.mkfifo(tmp_path / "engine")
    drain = f"echo >> {tmp_path}/drained; test $(wc -l < {tmp_path}/drained) -lt 2 || echo > {tmp_path}/engine; exit 0"
    front_end = f"trap '{drain}' USR1; {READY} while :; do sleep 0.01; done"

    def renew() -> None:
        signal.raise_signal(signal.SIGUSR1)

    with capture_logs() as logs:
        assert keep(f"{READY} read line < {tmp_path}/engine", front_end, when=(lambda: None, lambda: None, renew)) == 0
    assert [log["event"] for log in logs] == ["front ends are replaced"]
