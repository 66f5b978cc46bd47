"""A forked start is the true start: what the module sees, and how it ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import front_ends
from fork_server import STATUS, Start, ask
from forked import FRONT_END, ForkedProcess, ForkServer, ForkServers, true_start

from pagewire_client.local import ServiceProcess

TESTS = Path(__file__).parent
SEEN = """
import json, os, signal, sys
signals = {number.name: repr(signal.getsignal(number)) for number in signal.Signals}
print(json.dumps({
    "arguments": sys.argv, "path": sys.path, "folder": os.getcwd(), "environment": dict(os.environ), "name": __name__,
    "leads its session": os.getsid(0) == os.getpid(), "signals": signals, "stdin": sys.stdin.read(),
    "streams": [(stream.line_buffering, stream.write_through, stream.errors) for stream in (sys.stdout, sys.stderr)],
    "open files": sorted(set(os.listdir("/proc/self/fd")) & set("0123456789")),
    "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "main": sys.modules["__main__"].__dict__ is globals(),
}), file=sys.stderr)
"""
ENDS = {
    "at its end": "pass",
    "with a status": "raise SystemExit(66)",
    "with a sentence": "raise SystemExit('program: it cannot be')",
    "with an error": "print(1 / 0)",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
}
SLEEPS = "import sys, time; print('asleep', file=sys.stderr); time.sleep(600)"
IS_KILLED = """
import os, signal
from forked import ForkServer
process = ForkServer(["json"]).start("sleeps", [])
process.stderr.readline()
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
Write = Callable[[str], str]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(["json"])
    yield server
    server.close()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Makes this a module that can be run, and returns its name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def write(source: str, name: str = "forked_by_a_test") -> str:
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


def end(process: "ForkedProcess | subprocess.Popen[str]") -> tuple[int, list[str]]:
    """The exit status, and what the process wrote to stderr."""
    assert process.stderr is not None
    with process.stderr as stderr:
        lines = stderr.read().splitlines()
    return process.wait(60), lines


def test_a_module_sees_what_a_true_start_shows_it(
    server: ForkServer, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write(SEEN)
    monkeypatch.setenv("PAGEWIRE_TEST", "a variable of this start")
    monkeypatch.chdir(tmp_path)
    seen: list[dict[str, Any]] = []
    for start in (true_start, server.start):
        status, (line,) = end(start(module, ["--flag", "two words"]))
        assert status == 0
        seen.append(json.loads(line))
    for key in seen[0]:
        assert seen[1][key] == seen[0][key], key


@pytest.mark.parametrize("how", ENDS)
def test_it_ends_with_the_status_and_the_last_words_of_a_true_start(how: str, server: ForkServer, write: Write) -> None:
    module = write(ENDS[how])
    status, lines = end(true_start(module, []))
    forked_status, forked_lines = end(server.start(module, []))
    assert (forked_status, forked_lines[-1:]) == (status, lines[-1:])


def test_a_process_that_is_stopped_killed_and_asked_again_has_one_status(server: ForkServer, write: Write) -> None:
    process = server.start(write(SLEEPS), [])
    assert process.stderr.readline() == "asleep\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGSTOP)
    assert process.poll() is None
    process.kill()
    assert end(process) == (-signal.SIGKILL, [])
    process.kill()
    assert process.poll() == process.wait() == -signal.SIGKILL
    assert not psutil.pid_exists(process.pid)


def test_neither_server_nor_children_outlive_the_process_of_tests(write: Write) -> None:
    write(SLEEPS, "sleeps")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ["PYTHONPATH"]])}
    killed = subprocess.run([sys.executable, "-c", IS_KILLED], env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    child = int(killed.stdout)
    parents = [psutil.Process(child)] if psutil.pid_exists(child) else []
    psutil.wait_procs(parents, timeout=30)
    assert not psutil.pid_exists(child)


@pytest.mark.parametrize("ends_with_reader", [False, True])
def test_only_what_is_to_end_with_its_reader_does(ends_with_reader: bool, server: ForkServer, write: Write) -> None:
    """It does so even if it is stopped, as the system ends a child with its parent."""
    with open(os.devnull, "r+b") as null:
        start = Start(write(SLEEPS), [], dict(os.environ), os.getcwd(), ends_with_reader)
        status = ask(server.control, start, [null.fileno()] * 3)
    (process_id,) = STATUS.unpack(os.read(status, STATUS.size))
    child = psutil.Process(process_id)
    child.suspend()
    os.close(status)
    end(server.start(write("", "started_later"), []))  # so the server knows that the reader is gone
    if ends_with_reader:
        psutil.wait_procs([child], timeout=30)
    assert child.is_running() is not ends_with_reader
    with contextlib.suppress(psutil.NoSuchProcess):
        child.kill()


@pytest.fixture(scope="module")
def servers() -> Iterator[ForkServers]:
    servers = ForkServers()
    yield servers
    servers.close()


@pytest.fixture
def scheduler(servers: ForkServers, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServiceProcess]:
    """A forked one, whose workers are nowhere."""
    monkeypatch.setattr("pagewire_client.local.start_process", servers.start)
    scheduler = ServiceProcess("scheduler_service", ["--listen", "127.0.0.1:0", "--workers", "127.0.0.1:1"])
    yield scheduler
    scheduler.process.kill()
    scheduler.stop()


def front_end(address: object) -> psutil.Process:
    (process,) = front_ends(str(address))
    return process


def test_a_forked_scheduler_has_front_ends_that_are_forked_without_torch(scheduler: ServiceProcess) -> None:
    process = front_end(scheduler.wait_for("listening", 60)["address"])
    parent = process.parent()
    assert parent is not None
    assert parent.cmdline()[-len(FRONT_END) :] == list(FRONT_END)
    assert not [file.path for file in process.memory_maps() if "torch" in file.path]
    assert [file.path for file in process.memory_maps() if "tokenizers" in file.path]


def test_a_front_end_that_ends_is_started_again_and_the_last_one_ends_in_order(scheduler: ServiceProcess) -> None:
    address = scheduler.wait_for("listening", 60)["address"]
    front_end(address).kill()
    assert scheduler.wait_for("front end ended and is started again", 60)["status"] == -signal.SIGKILL
    scheduler.wait_for("front end listening", 60)
    process = front_end(address)
    assert scheduler.stop() == 0
    assert not process.is_running()


def test_a_front_end_ends_with_a_scheduler_that_is_killed_even_if_it_is_stopped(scheduler: ServiceProcess) -> None:
    process = front_end(scheduler.wait_for("listening", 60)["address"])
    process.suspend()
    scheduler.process.kill()
    _, alive = psutil.wait_procs([process], timeout=30)
    assert not alive
