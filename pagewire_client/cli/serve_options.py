"""The options of `pagewire_client serve`."""

import argparse

from pagewire_client.cli.flag_values import from_environment, given, whole_number
from pagewire_client.cli.running import DEFAULT_TARGET
from pagewire_common.connection.address import join_address, split_address

DEFAULT_HTTP_LISTEN = "127.0.0.1:8000"
DEFAULT_ADMIN_LISTEN = "127.0.0.1:50053"


def add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    serve = commands.add_parser("serve", help="start both services here: gRPC, and the HTTP APIs")
    serve.set_defaults(target=None)
    add_model(serve)
    serve.add_argument("--model", help='the model, as the first word (default "default")')
    serve.add_argument(
        "--listen",
        metavar="HOST:PORT",
        type=given,
        help=f"where HTTP is served (default {DEFAULT_HTTP_LISTEN})",
    )
    serve.add_argument("--host", type=given, help="the HOST of --listen, without its port")
    serve.add_argument("--port", type=whole_number(0, 65535), help="the PORT of --listen, without its host")
    serve.add_argument(
        "--grpc-listen",
        metavar="HOST:PORT",
        type=given,
        help=f"where gRPC is served (default {DEFAULT_TARGET}, or a free port if it is in use)",
    )
    serve.add_argument(
        "--admin-listen",
        metavar="HOST:PORT",
        type=given,
        default=from_environment("PAGEWIRE_ADMIN_LISTEN"),
        help=f"where operators' commands are served (default {DEFAULT_ADMIN_LISTEN}, or a free port if it is in use)",
    )
    serve.add_argument(
        "--record", metavar="FILE", help="write every request and decision to a new file, for `pagewire replay`"
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "named", metavar="MODEL", nargs="?", help="default, a Hugging Face directory, a GGUF file or a hub name"
    )


def one_model(arguments: argparse.Namespace) -> str | None:
    """The model of the command line. Raises ValueError for two."""
    if arguments.named and arguments.model:
        raise ValueError(f"--model is {arguments.model}, but MODEL is {arguments.named}; give one of them")
    model: str | None = arguments.named or arguments.model
    return model


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
