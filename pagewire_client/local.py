"""Starts both services as child processes on free ports, for offline batches, demos and tests."""

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, Self

STOP_SECONDS = 10.0
ADMIN = ("--admin-listen", "127.0.0.1:0")
HTTP = ("--http-listen", "127.0.0.1:0")
SILENT_SECONDS = 2.0
"""Seconds without a log line after which the user is told why the start waits."""
MAX_EVENTS = 1000
LOOK_SECONDS = 0.2
POOLS: Mapping[int, tuple[str, ...]] = {ord("s"): ("--num-gpu-blocks-override", "512"), ord("w"): ()}
"""Flags of the next worker by the byte that asks for it. Any other byte asks for the last worker's flags."""


class ServerError(Exception):
    """A service could not be started. The message is its last line."""


def start_process(module: str, arguments: Sequence[str], pipes: Sequence[int] = ()) -> "subprocess.Popen[str]":
    """`pipes`: file descriptors that the process inherits."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches only the parent, which stops its children in order
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        pass_fds=pipes,
    )


def stage_of(event: Mapping[str, object]) -> str:
    """The stage of a service's start, such as `loading weights, 40%`; empty if the event is no stage."""
    stage, done, total = event.get("stage", ""), event.get("done"), event.get("total")
    far = f", {done / total:.0%}" if isinstance(done, int) and isinstance(total, int) and total else ""
    return f"{stage}{far}"


Describe = Callable[[Mapping[str, object]], str]


def no_line(_: Mapping[str, object]) -> str:
    return ""


class ServiceProcess:
    """One service, whose address is read from its JSON log. Its other output is printed.

    `describe` returns the line that is printed for an event of the log; empty for none.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], describe: Describe = no_line, pipes: Sequence[int] = ()
    ) -> None:
        self.module = module
        self._describe = describe
        self.last_words = ""
        self._events: queue.Queue[dict[str, object] | None] = queue.Queue()
        self.process = start_process(module, ["--log-format", "json", *arguments], *([pipes] if pipes else ()))
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    def _read(self, stderr: IO[str]) -> None:
        with stderr:
            self._read_lines(stderr)
        self._events.put(None)

    def _read_lines(self, stderr: IO[str]) -> None:
        for line in stderr:  # a progress bar ends its lines with carriage returns
            try:
                event = json.loads(line)
            except ValueError:
                if line.strip():
                    self.last_words = line.strip()
                    end = "\n" if line.startswith(self.module) else "\r"
                    print(line.rstrip("\n"), end=end, file=sys.stderr, flush=True)  # noqa: T201
                continue
            if not isinstance(event, dict):
                continue
            if event.get("level") in ("warning", "error"):
                print(f"{self.module}: {line.rstrip()}", file=sys.stderr, flush=True)  # noqa: T201
            elif line := self._describe(event):
                print(line, file=sys.stderr, flush=True)  # noqa: T201
            self._events.put(event)
            if self._events.qsize() > MAX_EVENTS:  # no code reads events after the start
                self._events.get_nowait()

    def wait_for(self, name: str, timeout: float) -> dict[str, object]:
        """Wait for a log event. Raises ServerError if the process ends, or after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        reason = doing = said = ""
        while True:
            left = deadline - time.monotonic()
            try:
                event = self._events.get(timeout=max(0.0, min(left, SILENT_SECONDS)))
            except queue.Empty:
                if left <= 0:
                    why = f": {reason}" if reason else ""
                    raise ServerError(f"{self.module} was not ready within {timeout:g} s{why}") from None
                if (waits := reason or doing) != said:
                    said = waits
                    print(f"waiting for {self.module}: {waits}", file=sys.stderr, flush=True)  # noqa: T201
                continue
            if event is None:
                raise ServerError(self.last_words or f"{self.module} ended with status {self.process.wait()}")
            if event.get("event") == name:
                return event
            if event.get("event") == "worker unavailable":
                reason = str(event.get("reason"))
            doing = stage_of(event)

    def stop(self) -> int:
        """Send SIGTERM, then SIGKILL. Returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(SILENT_SECONDS)
            if self.process.poll() is None:
                left = STOP_SECONDS - SILENT_SECONDS
                print(f"waiting for {self.module} to finish, for at most {left:g} s", file=sys.stderr, flush=True)  # noqa: T201
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(left)
            self.process.kill()  # nothing happens if it has ended
        status = self.process.wait()
        self._reader.join()
        return status


class LocalServer:
    """A scheduler and a worker on this machine. Raises ServerError if either does not start.

    `learns`: the page of the HTTP port may kill the worker, which `wait` starts again.
    """

    def __init__(
        self,
        model: str = "default",
        *,
        scheduler_arguments: Sequence[str] = (),
        worker_arguments: Sequence[str] = (),
        timeout: float = 600.0,
        describe: Describe = no_line,
        learns: bool = False,
    ) -> None:
        self.processes: list[ServiceProcess] = []
        self._describe = describe
        self._worker_arguments = ["--model", model, *worker_arguments]
        self._worker_address = ""
        self._kills: int | None = None  # a pipe, of which each byte asks for a kill
        self._pool: tuple[str, ...] = ()
        try:
            worker = self._start("worker_service", self._worker_arguments)
            self._worker_address = worker_address = str(worker.wait_for("listening", timeout)["address"])
            arguments = [*ADMIN, *HTTP, "--workers", worker_address, *scheduler_arguments]
            scheduler = self._start_learning(arguments) if learns else self._start("scheduler_service", arguments)
            self.admin_target = str(scheduler.wait_for("admin listening", timeout)["address"])
            listening = scheduler.wait_for("listening", timeout)
            self.target = str(listening["address"])
            self.http_url = f"{'https' if 'tls' in listening else 'http'}://{listening['http']}"
            worker.wait_for("ready", timeout)
            scheduler.wait_for("ready", timeout)
        except BaseException:
            self.stop()
            raise

    def _start(self, module: str, arguments: Sequence[str], pipes: Sequence[int] = ()) -> ServiceProcess:
        process = ServiceProcess(module, ["--listen", "127.0.0.1:0", *arguments], self._describe, pipes)
        self.processes.append(process)
        return process

    def _start_learning(self, arguments: Sequence[str]) -> ServiceProcess:
        self._kills, theirs = os.pipe()
        try:
            return self._start("scheduler_service", ["--learn-pipe", str(theirs), *arguments], [theirs])
        finally:
            os.close(theirs)

    def wait(self) -> None:
        """Wait until one of the services ends, and raise ServerError then."""
        while all(process.process.poll() is None for process in self.processes):
            if self._kills is None:
                time.sleep(LOOK_SECONDS)
            elif select.select([self._kills], [], [], LOOK_SECONDS)[0]:
                if asked := os.read(self._kills, 64):
                    for byte in asked:
                        self._pool = POOLS.get(byte, self._pool)
                    self.renew_worker()
                else:  # the scheduler has ended
                    time.sleep(LOOK_SECONDS)
        ended = next(process for process in self.processes if process.process.poll() is not None)
        raise ServerError(ended.last_words or f"{ended.module} ended with status {ended.process.returncode}")

    def renew_worker(self) -> None:
        """Kill the worker, and start another at its address."""
        self.processes[0].process.kill()
        self.processes[0].stop()
        arguments = [*self._worker_arguments, *self._pool, "--listen", self._worker_address]
        self.processes[0] = ServiceProcess("worker_service", arguments, self._describe)

    def stop(self) -> list[int]:
        """Stop the scheduler, then the worker. Returns their exit statuses."""
        if self._kills is not None:
            os.close(self._kills)
            self._kills = None
        statuses = [process.stop() for process in reversed(self.processes)]
        self.processes.clear()
        return statuses

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
