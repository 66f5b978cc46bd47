"""The flags of all commands."""

import argparse

from pagewire_client.cli.flag_values import client_setting, folder, from_environment, given, seconds
from pagewire_client.cli.operator_options import add_operators_commands
from pagewire_client.cli.request_options import request_parser, sampling_params, sampling_parser
from pagewire_client.cli.serve_options import add_serve, http_listen
from pagewire_client.cli.text_options import add_texts
from pagewire_client.client import RETRY_SECONDS
from pagewire_common.version import version_of

DESCRIPTION = """The command line: generate, chat, embed and score, against a server or one of its own; serve OpenAI's
HTTP API; watch a cluster and drain its workers."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
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
        help="a running scheduler service; without one, both services are started here for this command",
    )
    server.add_argument("--model", help='what to serve when no --target is given (default "default")')
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

    parser = argparse.ArgumentParser(prog="pagewire_client", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=version_of("pagewire_client"))
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser("generate", parents=[common], help="continue a prompt")
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
    chat = commands.add_parser("chat", parents=[common], help="talk with the model; Ctrl-D ends")
    chat.add_argument("--system", help="the system message")
    add_serve(commands)
    add_texts(commands, request)
    add_operators_commands(commands, tls)
    parsed = parser.parse_args(arguments)
    if parsed.command in ("generate", "chat"):
        try:
            parsed.sampling = sampling_params(parsed)
        except ValueError as error:
            parser.error(str(error))
    if getattr(parsed, "model", None) and parsed.target:
        parser.error(
            f"--model is for a server that the command starts, but the target {parsed.target} is a running server"
        )
    if parsed.command != "new-key" and not parsed.target and parsed.command != "serve":
        parsed.retry_for = 0.0  # the command's own server is never restarted
    if parsed.command != "new-key":
        _take_credentials(parsed)
    if parsed.command == "serve":
        try:
            parsed.listen = http_listen(parsed)
        except ValueError as error:
            parser.error(str(error))
    return parsed


def _take_credentials(parsed: argparse.Namespace) -> None:
    """Read the credentials from the environment. A command's own server uses plain text and its own key."""
    if not parsed.target:
        parsed.tls, parsed.api_key = None, from_environment("PAGEWIRE_API_KEY") or ""
        return
    if parsed.tls is None and (text := client_setting("TLS")):
        parsed.tls = folder(text)
    parsed.api_key = client_setting("API_KEY") or ""
