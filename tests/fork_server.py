"""A process that has imported a service's modules, and forks a child for each start: a fork takes 10 ms of CPU,
`import torch` 2 s.

python fork_server.py DESCRIPTOR MODULE... imports the modules and answers forked.py's requests on that socket. A child
is like `python -m MODULE`, with the request's arguments, environment, folder, session and standard streams. This
process has no threads, which a fork would lose, and ends with all its children when every process that may ask it has
ended. With --front-ends, its children are schedulers, which ask for front ends on that other socket.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_REQUEST_BYTES = 200_000
STATUS = struct.Struct("i")
"""A child's process id, and later its exit status, as in subprocess.Popen."""


@dataclass(frozen=True)
class Start:
    """The properties of one start."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    ends_with_reader: bool = False
    """Whether it is killed when the process that asked for it has ended."""


@dataclass(frozen=True)
class Child:
    pid: int
    status: int
    """The descriptor to write its exit status to."""


def ask(control: socket.socket, start: Start, streams: Sequence[int]) -> int:
    """Request a start with these as stdin, stdout and stderr; returns where to read the child's status."""
    status, theirs = os.pipe()
    try:
        socket.send_fds(control, [json.dumps(vars(start)).encode()], [*streams, theirs])
    except OSError:
        os.close(status)
        raise
    finally:
        os.close(theirs)
    return status


def serve(control: socket.socket) -> tuple[Start, list[int]]:
    """Fork for each request. Returns only in the children: the start, and stdin, stdout and stderr."""
    children: dict[int, Child] = {}  # by the descriptor that tells their end
    watched: dict[int, Child] = {}  # those that end with their reader, by the descriptor of their status
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        (descriptor, _), *_ = poll.poll()  # one, for the others may be closed after it
        if (left := watched.pop(descriptor, None)) is not None:
            poll.unregister(descriptor)
            os.kill(left.pid, signal.SIGKILL)
            continue
        if (ended := children.pop(descriptor, None)) is not None:
            poll.unregister(descriptor)
            os.close(descriptor)
            if watched.pop(ended.status, None) is not None:
                poll.unregister(ended.status)
            _report_end(ended)
            continue
        message, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 4)
        if not message:  # every process that had the other end has closed it, or is gone
            for child in children.values():
                os.kill(child.pid, signal.SIGKILL)
            os._exit(0)
        start = Start(**json.loads(message))
        *streams, status = descriptors
        if not (pid := os.fork()):
            for end, child in children.items():
                os.close(end)
                os.close(child.status)
            os.close(status)
            control.close()
            return start, streams
        for stream in streams:
            os.close(stream)
        _tell(status, pid)
        end = os.pidfd_open(pid)
        children[end] = Child(pid, status)
        poll.register(end, select.POLLIN)
        if start.ends_with_reader:
            watched[status] = children[end]
            poll.register(status, 0)  # that the reader is gone is told unasked


def _report_end(child: Child) -> None:
    _, status = os.waitpid(child.pid, 0)
    _tell(child.status, os.waitstatus_to_exitcode(status))
    os.close(child.status)


def _tell(status: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # what asked for the start is gone, or does not ask any more
        os.write(status, STATUS.pack(number))


def become(start: Start, streams: list[int], of_imports: dict[str, str]) -> None:
    """Run the module in this process, with the variables that imports have set."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(start.folder)
    os.environ.clear()
    os.environ.update(start.environment | of_imports)
    sys.argv[1:] = start.arguments
    sys.path[:0] = [start.folder, *filter(None, start.environment.get("PYTHONPATH", "").split(os.pathsep))]
    if "numpy" in sys.modules:  # `random` sees to it itself, and torch begins with the same seed in every process
        sys.modules["numpy"].random.seed()
    runpy.run_module(start.module, run_name="__main__", alter_sys=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--front-ends", type=int)
    parser.add_argument("control", type=int)
    parser.add_argument("modules", nargs="+")
    arguments = parser.parse_args()
    control = _socket(arguments.control)
    before = dict(os.environ)
    root = Path(__file__).parents[1]  # the services of this checkout, even if another one is installed
    sys.path[:0] = [str(root), str(root / "protos")]
    if arguments.front_ends is not None:
        importlib.import_module("forked_front_ends").fork_front_ends(_socket(arguments.front_ends))
    sys.path.remove(str(Path(__file__).parent))
    modules = arguments.modules
    for module in modules:
        importlib.import_module(module)
        if module.endswith(".__main__"):
            del sys.modules[module]  # it is to be run
    del sys.path[:2]
    of_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    num_threads = len(os.listdir("/proc/self/task"))
    assert num_threads == 1, f"imports of {modules} have started {num_threads - 1} threads, which children would lack"
    gc.collect()
    # Collections in the children would write to shared pages; one at the end costs 0.5 s.
    gc.freeze()
    become(*serve(control), of_imports)


def _socket(descriptor: int) -> socket.socket:
    inherited = socket.socket(fileno=descriptor)
    inherited.set_inheritable(False)
    return inherited


if __name__ == "__main__":
    main()
