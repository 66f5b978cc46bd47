"""Starts all ranks of a worker on this machine, and ends them together.

The launcher uses torchrun's library and environment variables, but never restarts a rank. When one rank has ended, the
others are killed immediately, even in a collective operation. Signals are passed to the first rank."""

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import (
    LogsDest,
    LogsSpecs,
    SignalException,
    SubprocessContext,
    start_processes,
)

from worker_service.parallel import LAUNCHER

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_LOOK_SECONDS = 0.1
_FAREWELL_SECONDS = 0.5
"""Seconds to wait for the first rank after another has failed, perhaps because the first was ending."""
_STOPPED = (0, -signal.SIGTERM, -signal.SIGINT)
"""Exit statuses of a first rank that a signal has stopped."""
_EXPLAINED = (0, 1)
"""Exit statuses of a rank that has ended by itself, and has logged any error."""


def launch(command: Sequence[str], size: int) -> int:
    """Run `command` in `size` processes until the first rank ends or another fails. Returns the worker's exit status.

    Only the main thread may call this function, which sets signal handlers."""
    store = _open_store()
    shared = {
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(size),
        "TORCHELASTIC_RUN_ID": "pagewire",
        LAUNCHER: str(os.getpid()),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # The network cannot reach ranks that communicate through the loopback interface.
        "GLOO_SOCKET_IFNAME": _loopback(),
        "NCCL_SOCKET_IFNAME": _loopback(),
    }
    try:
        context = start_processes(
            name="rank",
            entrypoint=command[0],
            args=dict.fromkeys(range(size), tuple(command[1:])),
            envs={rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)},
            logs_specs=_OwnStreams(),
        )
    except SignalException:
        return 0  # the ranks end with this process
    assert isinstance(context, SubprocessContext)
    ranks = [context.subprocess_handlers[rank].proc for rank in range(size)]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: ranks[0].send_signal(number))
    return wait_for_end(ranks)


def wait_for_end(ranks: Sequence["subprocess.Popen[bytes]"]) -> int:
    """Wait until the first rank ends or another fails, and kill the rest. Returns the worker's exit status."""
    # Ranks with status 0 are ignored: when the first rank ends, others may exit before it.
    while ranks[0].poll() is None and not any(process.poll() for process in ranks):
        time.sleep(_LOOK_SECONDS)
    try:
        status = ranks[0].wait(_FAREWELL_SECONDS)
    except subprocess.TimeoutExpired:
        status = 1
    for rank, process in enumerate(ranks):
        if (ended := process.poll()) is not None and ended not in (*_EXPLAINED, *_STOPPED):
            log.error("rank %d ended with status %d, and the worker with it", rank, ended)
    for process in ranks:
        process.kill()
        process.wait()
    return 0 if status in _STOPPED else 1


def _open_store() -> TCPStore:
    """Open the ranks' TCPStore on a free loopback port. TCPStore itself would listen on all addresses."""
    listening = socket.create_server((_HOST, 0))
    port = listening.getsockname()[1]
    return TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _loopback() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


class _OwnStreams(LogsSpecs):
    """Ranks write to the launcher's stdout and stderr, and not into log files."""

    @property
    def root_log_dir(self) -> str:
        return ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        own = dict.fromkeys(envs, "")
        return LogsDest(stdouts=own, stderrs=own, error_files=own)
