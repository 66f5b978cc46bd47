"""The flags of all commands."""

import argparse
from collections.abc import Callable

from pagewire_client.cli.flag_values import folder, from_environment, given, image_file, seconds, take_credentials
from pagewire_client.cli.operator_options import add_operators_commands
from pagewire_client.cli.request_options import request_parser, sampling_params, sampling_parser
from pagewire_client.cli.running import DEFAULT_TARGET
from pagewire_client.cli.serve_options import add_model, add_serve, http_listen, one_model
from pagewire_client.cli.texts import add_texts
from pagewire_client.client import RETRY_SECONDS
from pagewire_common.version import version_of

DESCRIPTION = """Generate, chat, embed, score and transcribe, by a running server or by one that the command
starts; serve a model; watch a cluster and drain its workers."""

PROGRAM = "pagewire_client"


def parse_arguments(
    arguments: list[str] | None = None,
    program: str = PROGRAM,
    find: Callable[[argparse.Namespace], None] | None = None,
) -> argparse.Namespace:
    """`find`: called for a command without a --target; may set `target` and its credentials."""
    parser = make_parser(program)
    parsed = parser.parse_args(arguments)
    try:
        if parsed.command == "run":
            parsed.command = "chat"
        if parsed.command in ("generate", "chat"):
            parsed.sampling = sampling_params(parsed)
        if getattr(parsed, "encoder", False) and parsed.image:
            raise ValueError("--image is for decoders, and --encoder gives the prompt to an encoder")
        if parsed.command in ("serve", "chat"):
            parsed.model = one_model(parsed)
        if parsed.command == "serve":
            parsed.listen = http_listen(parsed)
    except ValueError as error:
        parser.error(str(error))
    if getattr(parsed, "model", None) and parsed.target:
        parser.error(
            f"--model is for a server that the command starts, but the target {parsed.target} is a running server"
        )
    if parsed.command == "new-key":
        return parsed
    if parsed.target:
        take_credentials(parsed)
    elif find and parsed.command != "serve":
        find(parsed)
    if not parsed.target:  # the command's own server uses plain text and its own key, and is never restarted
        parsed.tls, parsed.api_key, parsed.retry_for = None, from_environment("PAGEWIRE_API_KEY") or "", 0.0
    return parsed


def make_parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=version_of(program))
    add_commands(parser.add_subparsers(dest="command", required=True, metavar="COMMAND"))
    return parser


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    tls = argparse.ArgumentParser(add_help=False)
    tls.add_argument(
        "--tls",
        metavar="FOLDER",
        type=folder,
        help="connect by TLS with the folder's ca.crt, and with its tls.crt and tls.key if the server asks for a "
        "certificate. The API key is read from the environment variable PAGEWIRE_CLIENT_API_KEY",
    )
    server = argparse.ArgumentParser(add_help=False, parents=[tls])
    server.add_argument(
        "--target",
        metavar="HOST:PORT",
        type=given,
        default=from_environment("PAGEWIRE_TARGET"),
        help=f"a running scheduler service (default: {DEFAULT_TARGET} if a server answers there; else both services "
        "are started here for this command)",
    )
    server.add_argument("--model", help='the model, without a --target: see `pagewire serve` (default "default")')
    request = request_parser(server)
    common = sampling_parser(request)
    common.add_argument(
        "--retry-for",
        metavar="SECONDS",
        type=seconds(0),
        default=RETRY_SECONDS,
        help="how long to wait for a --target that cannot be reached or has no worker; 0: as long as the server waits "
        "(default %(default)g)",
    )

    image = argparse.ArgumentParser(add_help=False)
    image.add_argument(
        "--image",
        metavar="FILE",
        type=image_file,
        action="append",
        default=[],
        help="an image before the prompt, for models that read images; may be repeated",
    )
    generate = commands.add_parser("generate", parents=[common, image], help="continue a prompt")
    generate.add_argument("prompt", help="the prompt; - reads it from stdin")
    kinds = generate.add_mutually_exclusive_group()
    kinds.add_argument("--chat", action="store_true", help="format the prompt with the model's chat template")
    kinds.add_argument(
        "--encoder", action="store_true", help="for encoder-decoder models: give the prompt to the encoder"
    )
    generate.add_argument(
        "--parse-special-tokens",
        action="store_true",
        help="parse special tokens in the prompt, for prompts that have the chat template's format already",
    )
    chat = commands.add_parser(
        "chat", aliases=["run"], parents=[common, image], help="talk with the model; Ctrl-D ends"
    )
    add_model(chat)
    chat.add_argument("--system", help="the system message")
    add_serve(commands)
    add_texts(commands, request)
    add_operators_commands(commands, tls)
