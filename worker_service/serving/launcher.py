"""Starts a worker's ranks as processes of this machine, and ends them together.

It does the same as torchrun, with the same library and environment, except at the end. No rank is restarted, and when a
rank has ended, the others are killed at once, wherever they wait for it. Signals go to the first rank, whose exit
status is the worker's.
"""

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
"""Seconds for the first rank to end when another rank has failed: it may be ending by itself."""
_STOPPED = (0, -signal.SIGTERM, -signal.SIGINT)
"""Exit statuses of a first rank that was told to stop, perhaps before it could drain."""
_EXPLAINED = (0, 1)
"""Exit statuses of a rank that has ended itself and logged the reason."""


def launch(command: Sequence[str], size: int) -> int:
    """Run `command` in `size` ranks until the first ends or another fails; returns the exit status of the worker.

    Call it on the main thread. SIGTERM and SIGINT go to the first rank, which drains.
    """
    store = _open_store()
    shared = {
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(size),
        "TORCHELASTIC_RUN_ID": "pagewire",
        LAUNCHER: str(os.getpid()),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # Ranks of one machine need no network, and must not be reachable through it.
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
    """Wait until the first rank ends or another fails, and end the rest; returns the exit status of the worker."""
    # The other ranks end with status 0 when the first rank has gone, even if the first rank's own exit takes longer.
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
    """The store where the ranks meet, on a free port. TCPStore alone would listen on all addresses of the machine."""
    listening = socket.create_server((_HOST, 0))
    port = listening.getsockname()[1]
    return TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _loopback() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


class _OwnStreams(LogsSpecs):
    """Ranks write to the streams of the process that started them, without files in between."""

    @property
    def root_log_dir(self) -> str:
        return ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        own = dict.fromkeys(envs, "")
        return LogsDest(stdouts=own, stderrs=own, error_files=own)
