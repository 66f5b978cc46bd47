"""The gateway that serves OpenAI's HTTP API before a scheduler: smg, a program of its own, with our settings.

It has one backend, so it need not choose, and nothing of a request is kept. Requests are not tried again: the scheduler
waits for workers itself, and what it refuses because it is full is for the client to try later.
"""

import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from typing import Self

from pagewire_client.local import STOP_SECONDS, ServerError

SHUTDOWN_SECONDS = 5
"""How long requests in flight may take to end after SIGTERM."""
FLAGS = (
    "--backend=vllm",
    "--policy=round_robin",
    "--disable-retries",
    "--disable-circuit-breaker",
    "--disable-load-monitoring",
    "--max-concurrent-requests=0",  # the scheduler has a queue, and limits
    "--request-timeout-secs=86400",
    "--history-backend=none",
    "--max-background-responses=0",
    "--max-payload-size=67108864",
    "--health-check-interval-secs=2",
    "--worker-startup-check-interval=1",
    f"--shutdown-grace-period-secs={SHUTDOWN_SECONDS}",
    "--log-level=error",
    "--prometheus-host=127.0.0.1",
)
LOOK_SECONDS = 0.1


class Gateway:
    """Serves HTTP at `listen`, for the scheduler at `target`, from construction until `stop`."""

    def __init__(self, target: str, listen: str) -> None:
        host, _, port = listen.rpartition(":")
        if not (host and port.isdecimal()):
            raise ServerError(f"{listen!r} is no HOST:PORT to listen on")
        command = [sys.executable, "-m", "smg", "launch", f"--worker-urls=grpc://{target}", *FLAGS]
        command += [f"--host={host}", f"--port={port}", f"--prometheus-port={_free_port()}"]
        # The calls that change the gateway's backends need a key, and this one is not kept.
        command.append(f"--control-plane-api-keys=none:none:admin:{secrets.token_urlsafe()}")
        _check_free(host, int(port))
        self.url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"  # noqa: S104  # it is only compared
        # What it writes to stdout is its emblem.
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def wait_until_ready(self, timeout: float) -> None:
        """Return when a request would reach a model. Raises ServerError when the gateway ends, or time is over."""
        deadline = time.monotonic() + timeout
        while not is_ready(self.url):
            if self.process.poll() is not None:
                raise ServerError(f"the gateway at {self.url} ended with status {self.process.returncode}")
            if time.monotonic() > deadline:
                raise ServerError(f"the gateway at {self.url} found no model within {timeout:g} s")
            time.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL if that does not help."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def is_ready(url: str) -> bool:
    """Whether the gateway there has a scheduler whose workers take requests."""
    try:
        with urllib.request.urlopen(f"{url}/readiness", timeout=5) as answer:  # noqa: S310  # our own address
            return bool(answer.status == 200)
    except OSError:
        return False


def _check_free(host: str, port: int) -> None:
    """Raises ServerError, where the gateway would show a traceback."""
    try:
        socket.create_server((host, port)).close()
    except OSError:
        raise ServerError(f"cannot listen on {host}:{port}: the port is in use, or the address is not ours") from None


def _free_port() -> int:
    """For the gateway's own metrics, which it cannot do without."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":  # a container's health check: HOST:PORT
    sys.exit(not is_ready(f"http://{sys.argv[1]}"))
