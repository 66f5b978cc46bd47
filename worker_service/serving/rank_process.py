"""Runs the process of one rank. The first rank serves gRPC. Followers compute every step, discard their equal answers,
and end when the first rank has ended."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading

import structlog

from pagewire.v1.scheduler_output_pb2 import SchedulerOutput
from pagewire_common.start_error import StartError
from pagewire_common.telemetry.logs import configure_logging
from worker_service.parallel import LAUNCHER
from worker_service.serving.server import serve
from worker_service.settings import WorkerSettings

_PR_SET_PDEATHSIG = 1


async def run_rank(settings: WorkerSettings) -> None:
    """Run a rank until the worker ends. If the worker cannot start, only one rank raises StartError."""
    _die_with_launcher()
    try:
        if int(os.environ["RANK"]) == 0:
            await serve(settings)
        else:
            _follow(settings)
    except StartError:
        if not _is_first_to_fail():
            threading.Event().wait()  # until the launcher kills this process
        raise
    # Without torch's clean-up, which would wait for other ranks or report that they are gone.
    logging.shutdown()
    os._exit(0)


def _die_with_launcher() -> None:
    """The operating system kills this rank when the launcher ends, even if the launcher is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ.get(LAUNCHER, str(os.getppid())) != str(os.getppid()):
        os._exit(1)  # the launcher has already died


def _follow(settings: WorkerSettings) -> None:
    configure_logging(settings.log_level, settings.log_format)
    structlog.contextvars.bind_contextvars(rank=int(os.environ["RANK"]))
    for number in (signal.SIGTERM, signal.SIGINT):
        # The first rank drains, for which followers have to compute further steps.
        signal.signal(number, signal.SIG_IGN)

    from worker_service.errors import FencingError, InvalidStepError
    from worker_service.execution.adapters.rank_adapters import AdapterFollower
    from worker_service.execution.worker import load_worker
    from worker_service.parallel.ranks import BETWEEN_STEPS

    # These modules import torch, which takes a second.
    from worker_service.serving.codec.steps import decode_scheduler_output
    from worker_service.serving.open_session import StepInFlight
    from worker_service.session.session import Session

    worker = load_worker(settings)
    adapters = AdapterFollower(worker.ranks, worker.adapters)
    session: Session | None = None
    while (received := worker.ranks.receive()) is not None:
        epoch, message, drafts = received
        if epoch == BETWEEN_STEPS:
            adapters.follow(message)
            continue
        if session is None or session.epoch != epoch:
            session = Session(epoch, worker.limits)
        # The first rank raises the same error, and ends the session.
        with contextlib.suppress(InvalidStepError, FencingError):
            output = decode_scheduler_output(SchedulerOutput.FromString(message), worker.limits)
            step = StepInFlight.follow(worker, session, output, drafts)
            step.launch()
            step.answer()


def _is_first_to_fail() -> bool:
    """Whether this rank is the first to fail. Only the first reports why a model cannot be loaded."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return store.add("failures", 1) == 1
