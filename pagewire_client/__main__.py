"""Run a command by a server: the target, the one that runs at the default port, or one that the command starts."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys

import grpc

from pagewire_client.cli.flag_values import access
from pagewire_client.cli.generation import chat, generate
from pagewire_client.cli.operators import adapters, drain, new_key, requests, reset_prefix_cache
from pagewire_client.cli.parser import PROGRAM, parse_arguments
from pagewire_client.cli.running import find_server
from pagewire_client.cli.serve import serve
from pagewire_client.cli.texts import embed, score, transcribe
from pagewire_client.cli.watch import watch
from pagewire_client.local import LocalServer, ServerError


def run(arguments: argparse.Namespace, target: str) -> None:
    match arguments.command:
        case "embed":
            asyncio.run(embed(arguments, target))
        case "score":
            asyncio.run(score(arguments, target))
        case "transcribe":
            asyncio.run(transcribe(arguments, target))
        case "generate":
            asyncio.run(generate(arguments, target))
        case "chat":
            chat(arguments, target)
        case "watch":
            # The view shows lost connections itself.
            logging.getLogger("pagewire_client").setLevel(logging.WARNING)
            asyncio.run(watch(target, interval=arguments.interval, once=arguments.once, **access(arguments)))
        case "requests":
            asyncio.run(requests(arguments, target))
        case "adapters" | "load-adapter" | "unload-adapter":
            asyncio.run(adapters(arguments, target))
        case "reset-prefix-cache":
            asyncio.run(reset_prefix_cache(arguments, target))
        case _:
            asyncio.run(drain(arguments, target))


def main(program: str = PROGRAM) -> None:
    arguments = parse_arguments(program=program, find=find_server)
    logging.basicConfig(format=f"{program}: %(message)s")
    logging.getLogger("pagewire_client").setLevel(logging.INFO)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # line editing for input()
    # SIGTERM and SIGHUP act like Ctrl-C: the command ends and stops its child processes.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        if arguments.command == "new-key":
            new_key(arguments)
        elif arguments.command == "serve":
            os.environ.pop("PAGEWIRE_TLS", None)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the usual end of a server
            serve(arguments)
        elif arguments.target:
            run(arguments, arguments.target)
        else:
            os.environ.pop("PAGEWIRE_TLS", None)  # the started servers use plain text
            sys.stderr.write("starting a scheduler and a worker …\n")
            with LocalServer(arguments.model or "default") as server:
                run(arguments, server.target)
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (ServerError, ValueError, OSError) as error:
        sys.exit(f"{program}: {error}")
    except grpc.aio.AioRpcError as error:
        sys.exit(f"{program}: {error.code().name}: {error.details()}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
