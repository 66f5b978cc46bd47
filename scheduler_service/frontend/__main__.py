"""A front-end process, which the engine starts with `python -m scheduler_service.frontend --engine … --listen …`."""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from pagewire_common.connection.tls import Security, TlsFolder
from pagewire_common.processes.child_process import end_with_the_parent, leave_signals_to_the_parent
from pagewire_common.serving.server import MAX_CONNECTIONS, run
from pagewire_common.telemetry.logs import configure_logging

NICE = 5
MAX_DEAF_SECONDS = 60
"""Seconds after which SIGALRM ends a front end that does not listen. Its start takes seconds on a busy machine."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="scheduler_service.frontend", description=__doc__)
    parser.add_argument("--engine", required=True, help="where the engine listens for front ends")
    parser.add_argument("--listen", required=True, help="HOST:PORT to serve clients on, shared with other front ends")
    parser.add_argument("--http-listen", help="HOST:PORT to serve HTTP on, shared with other front ends")
    parser.add_argument("--http-allow-origin", action="append", default=[], help="origin of pages that may call")
    parser.add_argument("--allow-media-host", action="append", default=[], help="host to fetch images from")
    parser.add_argument("--no-page", action="store_true", help="serve no page at /")
    parser.add_argument("--response-template", type=Path, help="how the model writes reasoning and tool calls")
    parser.add_argument("--receive-timeout", type=float, default=60.0, help="seconds for an HTTP request to arrive")
    parser.add_argument("--grace", type=float, default=0.0, help="seconds for streams after SIGUSR1")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="auto")
    parser.add_argument("--max-connections", type=int, default=MAX_CONNECTIONS, help="connections of clients")
    parser.add_argument("--otlp-traces-endpoint", help="where spans of requests are sent to")
    parser.add_argument("--tls", type=Path, help="folder of certificates")
    parser.add_argument("--mutual-tls", action="store_true", help="clients need certificates")
    arguments = parser.parse_args()
    signal.alarm(MAX_DEAF_SECONDS)
    _keep_stderr_for_logs()
    configure_logging(arguments.log_level, arguments.log_format)
    leave_signals_to_the_parent()
    end_with_the_parent()  # an orphaned front end would keep the port open

    # with few cores, the engine comes first: a late front end sends fewer messages, a late engine idles workers
    os.nice(NICE)
    from scheduler_service.frontend.server import Ports, serve

    status = 0

    async def main() -> None:
        nonlocal status
        security = Security(TlsFolder(arguments.tls) if arguments.tls else None, arguments.mutual_tls)
        ports = Ports(
            arguments.listen,
            arguments.http_listen,
            security,
            arguments.max_connections,
            arguments.receive_timeout,
            arguments.grace,
            frozenset(arguments.http_allow_origin),
            not arguments.no_page,
            tuple(arguments.allow_media_host),
        )
        template = arguments.response_template
        response_template = json.loads(template.read_text()) if template is not None else None
        status = await serve(arguments.engine, ports, arguments.otlp_traces_endpoint, response_template)

    run("scheduler_service.frontend", main)
    sys.exit(status)


def _keep_stderr_for_logs() -> None:
    """Discard what C libraries write to stderr: the MP3 decoder wrote 77,000 lines for a client's file of 16 MiB."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


if __name__ == "__main__":
    main()
