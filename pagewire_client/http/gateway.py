"""The gateway that serves OpenAI's HTTP API for a scheduler: the program smg, with pagewire's settings.

The gateway has a single backend and stores no requests. The gateway does not retry requests, because the scheduler
itself waits for workers. If the scheduler is full and refuses a request, the client retries.
"""

import os
import secrets
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Self

from pagewire_client.local import STOP_SECONDS, ServerError
from pagewire_common.connection.channel import direct_opener
from pagewire_common.connection.tls import TlsFolder
from pagewire_common.serving.listening import cannot_listen

SHUTDOWN_SECONDS = 5
"""Seconds that requests in flight have to end after SIGTERM."""
FLAGS = (
    "--backend=vllm",
    "--policy=round_robin",
    "--disable-retries",
    "--disable-circuit-breaker",
    "--disable-load-monitoring",
    "--max-concurrent-requests=0",  # the scheduler itself queues and limits requests
    "--request-timeout-secs=86400",
    "--history-backend=none",
    "--max-background-responses=0",
    "--max-payload-size=67108864",
    "--health-check-interval-secs=2",
    "--worker-startup-check-interval=1",
    f"--shutdown-grace-period-secs={SHUTDOWN_SECONDS}",
    "--prometheus-host=127.0.0.1",
)
LOOK_SECONDS = 0.1
_LAUNCH = """
import ctypes, runpy, signal, sys
if sys.platform == "linux":  # the system ends it with its parent, also when that is killed
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
runpy.run_module("smg", run_name="__main__", alter_sys=True)
"""


class Gateway:
    """Serves HTTP at `listen`, for the scheduler at `target`, from construction until `stop`.

    `traces_endpoint` is http://HOST:PORT of a collector. The gateway exports spans if `traces_endpoint` is set. The
    scheduler's spans are children of the gateway's spans.
    """

    def __init__(self, target: str, listen: str, traces_endpoint: str | None = None) -> None:
        host, port = check_free(listen)
        command = [sys.executable, "-c", _LAUNCH, "launch", f"--worker-urls=grpc://{target}", *FLAGS]
        command += [f"--host={host}", f"--port={port}"]
        command.append(f"--prometheus-port={_free_port()}")  # The gateway's metrics cannot be switched off.
        # Calls that change the gateway's backends require a random key. The key is not stored, so such calls always
        # fail.
        command.append(f"--control-plane-api-keys=none:none:admin:{secrets.token_urlsafe()}")
        # The gateway exports spans only at log level info. The gateway writes info lines to stdout.
        command.append(f"--log-level={'info' if traces_endpoint else 'error'}")
        if traces_endpoint:
            if not traces_endpoint.startswith("http://"):
                raise ServerError(f"{traces_endpoint!r} is no http://HOST:PORT, which is what the gateway can send to")
            command += ["--enable-trace", f"--otlp-traces-endpoint={traces_endpoint.removeprefix('http://')}"]
        self.url = url_of("http", host, port)
        # The gateway writes only a banner to stdout.
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the gateway has reached a scheduler whose workers accept requests. Raises ServerError if the
        gateway ends, or after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not is_ready(self.url):
            if self.process.poll() is not None:
                raise ServerError(f"the gateway at {self.url} ended with status {self.process.returncode}")
            if time.monotonic() > deadline:
                raise ServerError(f"the gateway at {self.url} found no model within {timeout:g} s")
            time.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL if the process does not end."""
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


def is_ready(url: str, tls: Path | None = None) -> bool:
    """Whether the gateway at `url` has a scheduler whose workers accept requests.

    If a gateway asks for a client certificate, the certificate in the folder `tls` is sent. Raises StartError if the
    certificates in the folder cannot be used.
    """
    try:
        context = TlsFolder(tls).client_context() if tls else ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the gateway's readiness is no secret
        opener = direct_opener(urllib.request.HTTPSHandler(context=context))
        with opener.open(f"{url}/readiness", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def url_of(scheme: str, host: str, port: int) -> str:
    """The URL at which this machine reaches a server with this listening address."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # the address is only compared
    return f"{scheme}://{f'[{reached}]' if ':' in reached else reached}:{port}"


def check_free(listen: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT, or of [HOST]:PORT.

    Raises ServerError if the port cannot be used. Without this check, the gateway would print a traceback.
    """
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and port.isdecimal()):
        raise ServerError(f"{listen!r} is no HOST:PORT to listen on")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, int(port)), family=family).close()
    except OSError:
        raise ServerError(str(cannot_listen(listen, "--listen"))) from None
    return host, int(port)


def free_address() -> str:
    """A free port of this machine's loopback address."""
    return f"127.0.0.1:{_free_port()}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":  # the container's health check runs this module with HOST:PORT
    folder = os.environ.get("PAGEWIRE_HTTP_TLS")
    sys.exit(not is_ready(f"{'https' if folder else 'http'}://{sys.argv[1]}", Path(folder) if folder else None))
