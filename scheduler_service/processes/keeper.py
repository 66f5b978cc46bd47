"""The scheduler's first process: keeps an engine and its front ends running, and holds the clients' ports.

If the engine dies, its front ends and their connections live on: they attach to the next engine, and submit their
requests again with the tokens so far. The keeper has one thread, which waits for its children and for signals.
"""

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import structlog

from pagewire_common.processes.temporary import TemporaryFolder, remove_dead_folders
from pagewire_common.start_error import StartError
from scheduler_service.processes import child as children
from scheduler_service.processes.child import Child
from scheduler_service.processes.port import PATIENCE_SECONDS, reserved
from scheduler_service.settings import SchedulerSettings

log = structlog.get_logger()

FIRST_PAUSE_SECONDS = 0.1
LAST_PAUSE_SECONDS = 5.0
"""Seconds before a process is started again: the first after a process that ran longer than the last, else doubled."""
END_SECONDS = 5.0
"""Seconds for front ends to end after the engine."""
RENEW = signal.SIGUSR1
"""The signal with which the keeper replaces front ends, and a front end drains."""


class Place(NamedTuple):
    """The addresses that outlive an engine: its socket's target, HOST:PORT of gRPC and, or None, of HTTP. `is_used`:
    another engine has been ready there.
    """

    engine: str
    listen: str
    http_listen: str | None
    is_used: bool = False


@contextlib.contextmanager
def place_of(settings: SchedulerSettings) -> Iterator[Place]:
    """Raises StartError for a port in use."""
    http = settings.http_listen
    with (
        reserved(settings.listen, PATIENCE_SECONDS) as listen,
        nullcontext() if http is None else reserved(http, PATIENCE_SECONDS, "--http-listen") as http_listen,
        TemporaryFolder("engine") as folder,  # for this user only
    ):
        yield Place(f"unix:{folder / 'engine'}", listen, http_listen)


class Slot:
    """A process to keep running: its child, or the time at which it starts again."""

    def __init__(self, start: Callable[[int], children.Process]) -> None:
        self._start = start
        self._pause = FIRST_PAUSE_SECONDS
        self._began = 0.0
        self.child: Child | None = None
        self.replaced: Child | None = None
        """The child that goes on until `child` is ready."""
        self.due: float | None = 0.0

    def start(self, now: float) -> None:
        self._began, self.due = now, None
        try:
            self.child = children.spawn(self._start)
        except OSError as error:  # the system has no memory left, or runs too many processes
            log.error("process could not be started", reason=error.strerror or str(error))
            self.end(now)

    def end(self, now: float) -> None:
        """Start the process again after a pause."""
        lasted = now - self._began > LAST_PAUSE_SECONDS
        self._pause = FIRST_PAUSE_SECONDS if lasted else min(2 * self._pause, LAST_PAUSE_SECONDS)
        self.child, self.due = None, now + self._pause


class Keeper:
    """`run_engine` serves as an engine, and writes a byte to a file descriptor when front ends can attach."""

    def __init__(
        self, run_engine: Callable[[int], None], front_end_arguments: Sequence[str], num_front_ends: int
    ) -> None:
        self._engine = Slot(children.fork(run_engine))
        self._slots = [
            Slot(lambda pipe: children.start_front_end(front_end_arguments, pipe)) for _ in range(num_front_ends)
        ]
        self._leaving: set[Child] = set()
        self._renewing: list[Slot] = []
        self.was_ready = False
        self._is_stopping = False
        self._has_said_goodbye = False  # the engine, to its front ends

    def run(self) -> int:
        """Keep the processes until SIGTERM or SIGINT, or until the first engine cannot start. Returns the status."""
        with _signals() as signals:
            try:
                while True:
                    self._start(time.monotonic())
                    if (status := self._take(signals)) is not None:
                        return status
            finally:
                self._stop()

    @property
    def _children(self) -> dict[int, tuple[Slot | None, Child]]:
        """All children by their pipe, with the slots of those that start again."""
        kept = [(slot, slot.child) for slot in (self._engine, *self._slots) if slot.child is not None]
        replaced = [slot.replaced for slot in self._slots if slot.replaced is not None]
        found: list[tuple[Slot | None, Child]] = [*kept, *((None, child) for child in (*replaced, *self._leaving))]
        return {child.pipe: (slot, child) for slot, child in found}

    def _start(self, now: float) -> None:
        for slot in (self._engine, *self._slots):
            if slot.due is not None and slot.due <= now:
                slot.start(now)

    def _take(self, signals: int) -> int | None:
        """Wait for a signal, for a child's message or end, or until a start is due. Returns the exit status, if any."""
        poll, by_pipe = select.poll(), self._children
        for descriptor in (signals, *by_pipe):
            poll.register(descriptor, select.POLLIN)
        dues = [slot.due for slot in (self._engine, *self._slots) if slot.due is not None]
        timeout = max(0.0, min(dues) - time.monotonic()) * 1000 + 1 if dues else None
        for descriptor, _ in poll.poll(timeout):
            if descriptor == signals:
                self._take_signals(os.read(signals, 64))
                if self._is_stopping and self._engine.child is None:  # it has ended, and waits to be started again
                    return 0
                continue
            slot, child = by_pipe[descriptor]
            status = child.read()
            if slot is not None and slot.child is not child:  # a signal has just begun to replace it
                slot = None
            if slot is self._engine:
                self.was_ready |= child.is_ready
                if status is not None and (status == 0 or self._is_stopping or not self.was_ready):
                    slot.child = None
                    self._has_said_goodbye = status == 0 and child.is_ready
                    return 0 if self._is_stopping else status if status >= 0 else 1
            if status is not None:
                self._note_end(slot, child, status)
            elif slot in self._slots:
                self._note_ready(slot)
        return None

    def _take_signals(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            self._is_stopping = True
            if self._engine.child is not None:
                self._engine.child.signal(signal.SIGTERM)
        if RENEW in numbers and not self._renewing:
            log.info("front ends are replaced", front_ends=len(self._slots))
            self._renewing = [*self._slots]
            self._renew()

    def _note_end(self, slot: Slot | None, child: Child, status: int) -> None:
        if slot is None:
            self._leaving.discard(child)
            for other in self._slots:
                if other.replaced is child:
                    other.replaced = None
            return
        slot.end(time.monotonic())
        if slot is self._engine:
            log.error("the engine ended and is started again; its front ends wait", status=status)
        else:
            log.warning("front end ended and is started again", status=status)

    def _note_ready(self, slot: Slot) -> None:
        if slot.replaced is not None:
            slot.replaced.signal(RENEW)
            self._leaving.add(slot.replaced)
            slot.replaced = None
        if self._renewing and slot is self._renewing[0]:
            del self._renewing[0]
            self._renew()

    def _renew(self) -> None:
        """Start a second process in the next slot; the first one drains when the second is ready."""
        if self._renewing:
            slot = self._renewing[0]
            slot.replaced, slot.child = slot.child, None
            slot.start(time.monotonic())

    def _stop(self) -> None:
        """Wait for the front ends, which end at the engine's goodbye or else by RENEW; then kill all children."""
        if self._engine.child is not None:
            self._engine.child.signal(signal.SIGKILL)
        deadline, by_pipe = time.monotonic() + END_SECONDS * self.was_ready, self._children
        for _, child in by_pipe.values():
            if not self._has_said_goodbye:
                child.signal(RENEW)
        while by_pipe:
            if (left := deadline - time.monotonic()) <= 0:
                for _, child in by_pipe.values():
                    child.signal(signal.SIGKILL)
            poll = select.poll()
            for descriptor in by_pipe:
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(max(0.0, left) * 1000 if left > 0 else None):
                if by_pipe[descriptor][1].read() is not None:
                    del by_pipe[descriptor]


def check_response_template(file: Path) -> None:
    """Raises StartError if the front ends could not read the file."""
    try:
        template = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise StartError(f"--response-template: {file} cannot be read: {error}") from None
    if not isinstance(template, dict) or not isinstance(template.get("fields"), dict):
        raise StartError(f"--response-template: {file} is no response template: it has no object `fields`")


def keep(settings: SchedulerSettings, run_engine: Callable[[Place, int], None]) -> int:
    """Keep an engine and its front ends. Returns the process's exit status. Raises StartError."""
    if settings.response_template is not None:
        check_response_template(settings.response_template)
    remove_dead_folders()
    with place_of(settings) as place:
        arguments = front_end_arguments(settings, place)

        def run(pipe: int) -> None:  # in a fork of the keeper
            run_engine(place._replace(is_used=keeper.was_ready), pipe)

        keeper = Keeper(run, arguments, settings.frontends)
        return keeper.run()


def front_end_arguments(settings: SchedulerSettings, place: Place) -> list[str]:
    arguments = ["--engine", place.engine, "--listen", place.listen, "--grace", str(settings.grace)]
    if place.http_listen is not None:
        arguments += ["--http-listen", place.http_listen, "--receive-timeout", str(settings.receive_timeout)]
    if not settings.page:
        arguments += ["--no-page"]
    for origin in settings.http_allow_origin:
        arguments += ["--http-allow-origin", origin]
    for host in settings.allow_media_host:
        arguments += ["--allow-media-host", host]
    if settings.response_template is not None:
        arguments += ["--response-template", str(settings.response_template)]
    arguments += ["--log-level", settings.log_level, "--log-format", settings.log_format]
    arguments += ["--max-connections", str(settings.max_connections)]
    if settings.otlp_traces_endpoint is not None:
        arguments += ["--otlp-traces-endpoint", settings.otlp_traces_endpoint]
    if settings.tls is not None:
        arguments += ["--tls", str(settings.tls), *(["--mutual-tls"] if settings.mutual_tls else [])]
    return arguments


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """A file descriptor from which the numbers of arriving signals can be read."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    before = signal.set_wakeup_fd(theirs)
    numbers = (signal.SIGTERM, signal.SIGINT, RENEW)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield ours
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(ours)
        os.close(theirs)
