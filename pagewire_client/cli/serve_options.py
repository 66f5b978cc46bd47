"""The options of `pagewire_client serve`, which are parsed without the gateway's libraries."""

import argparse
import os

from pagewire_client.cli.flag_values import folder, from_environment, given, seconds, whole_number
from pagewire_common.connection.address import join_address, split_address

DEFAULT_HTTP_LISTEN = "127.0.0.1:8000"


def add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", server: argparse.ArgumentParser) -> None:
    serve = commands.add_parser("serve", parents=[server], help="serve OpenAI's HTTP API")
    serve.add_argument(
        "--listen",
        metavar="HOST:PORT",
        type=given,
        help=f"where HTTP is served (default {DEFAULT_HTTP_LISTEN})",
    )
    serve.add_argument("--host", type=given, help="the HOST of --listen, without its port")
    serve.add_argument("--port", type=whole_number(0, 65535), help="the PORT of --listen, without its host")
    serve.add_argument(
        "--http-tls",
        metavar="FOLDER",
        type=folder,
        default=from_environment("PAGEWIRE_HTTP_TLS"),
        help="serve HTTPS with the folder's tls.crt and tls.key",
    )
    serve.add_argument(
        "--http-mutual-tls",
        action="store_true",
        default=_is_on("PAGEWIRE_HTTP_MUTUAL_TLS"),
        help="with --http-tls: require client certificates that the folder's ca.crt has signed",
    )
    serve.add_argument(
        "--max-connections",
        metavar="NUMBER",
        type=whole_number(1, 1 << 30),
        default=4096,
        help="HTTP connections at once; further connections are closed (default %(default)d)",
    )
    serve.add_argument(
        "--receive-timeout",
        metavar="SECONDS",
        type=seconds(0.001, 86_400),
        default=60.0,
        help="time limit for the head of a request, from the connection's start or the previous answer, and for the "
        "request's body (default %(default)g)",
    )
    serve.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        default=from_environment("PAGEWIRE_OTLP_TRACES_ENDPOINT"),
        help="http://HOST:PORT of an OpenTelemetry collector that the gateway sends its spans to",
    )


def http_listen(arguments: argparse.Namespace) -> str:
    """HOST:PORT from the flags, or else the environment. Raises ValueError if flags contradict each other."""
    whole, host, port = arguments.listen, arguments.host, arguments.port
    if whole is not None:
        if host is not None or port is not None:
            raise ValueError("--host and --port are parts of --listen; give one or the other")
        return str(whole)
    whole = from_environment("PAGEWIRE_HTTP_LISTEN") or DEFAULT_HTTP_LISTEN
    host = host or from_environment("PAGEWIRE_HTTP_HOST")
    # Kubernetes sets PAGEWIRE_HTTP_PORT to tcp://… in pods if a Service has the name "pagewire-http".
    if port is None and (text := from_environment("PAGEWIRE_HTTP_PORT")) and not text.startswith("tcp://"):
        try:
            port = whole_number(0, 65535)(text)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"PAGEWIRE_HTTP_PORT: {error}") from None
    if host is None and port is None:
        return whole
    whole_host, whole_port = split_address(whole)
    return join_address(host or whole_host, whole_port if port is None else port)


def _is_on(name: str) -> bool:
    """An environment variable's boolean. If it is neither true nor false, the command ends."""
    word = os.environ.get(name, "").lower()
    if word in ("", "0", "false", "no", "off", "n", "f"):
        return False
    if word in ("1", "true", "yes", "on", "y", "t"):
        return True
    raise SystemExit(f"{name} is {word!r}; it must be true or false")
