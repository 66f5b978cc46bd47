"""A forked start is the true start: what the module sees, and how it ends."""

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
from forked import ForkedProcess, ForkServer, true_start

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
