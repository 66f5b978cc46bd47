"""The options of `pagewire_client serve`, which the command line knows without the libraries that serving needs."""

import argparse
import os

from pagewire_client.flag_values import folder, from_environment, given, seconds, whole_number

DEFAULT_HTTP_LISTEN = "127.0.0.1:8000"


def add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", server: argparse.ArgumentParser) -> None:
    serve = commands.add_parser("serve", parents=[server], help="serve OpenAI's HTTP API")
    serve.add_argument(
        "--listen",
        metavar="HOST:PORT",
        type=given,
        default=from_environment("PAGEWIRE_HTTP_LISTEN") or DEFAULT_HTTP_LISTEN,
        help=f"where HTTP is served (default {DEFAULT_HTTP_LISTEN})",
    )
    serve.add_argument(
        "--http-tls",
        metavar="FOLDER",
        type=folder,
        default=from_environment("PAGEWIRE_HTTP_TLS"),
        help="serve HTTPS, with its tls.crt and tls.key",
    )
    serve.add_argument(
        "--http-mutual-tls",
        action="store_true",
        default=_is_on("PAGEWIRE_HTTP_MUTUAL_TLS"),
        help="with --http-tls: clients need a certificate that its ca.crt vouches for",
    )
    serve.add_argument(
        "--max-connections",
        metavar="NUMBER",
        type=whole_number(1, 1 << 30),
        default=4096,
        help="connections of HTTP clients at once; those beyond it are closed (default %(default)d)",
    )
    serve.add_argument(
        "--receive-timeout",
        metavar="SECONDS",
        type=seconds(0.001, 86_400),
        default=60.0,
        help="how long a connection may be open, or idle after an answer, until the head of a request has come, and "
        "how long the body may take that follows (default %(default)g)",
    )
    serve.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        default=from_environment("PAGEWIRE_OTLP_TRACES_ENDPOINT"),
        help="http://HOST:PORT of an OpenTelemetry collector that the gateway sends its spans to",
    )


def _is_on(name: str) -> bool:
    """Of a variable of the environment; a word that is not known ends the command."""
    word = os.environ.get(name, "").lower()
    if word in ("", "0", "false", "no", "off", "n", "f"):
        return False
    if word in ("1", "true", "yes", "on", "y", "t"):
        return True
    raise SystemExit(f"{name} is {word!r}; it must be true or false")
