"""Finds the server that runs at the default port, so that a command need not start one."""

import argparse
import asyncio
import socket
import sys
from pathlib import Path

import grpc

from pagewire_client.cli.flag_values import access, take_credentials
from pagewire_client.client import Client
from pagewire_common.connection.address import split_address

DEFAULT_TARGET = "127.0.0.1:50051"
ANSWER_SECONDS = 2.0
"""Seconds for a server on this machine to accept a connection and to say what it serves."""
TASKS = {"generate": "generate", "chat": "generate", "embed": "embed", "score": "score", "transcribe": "transcribe"}
"""The task of a model that each command needs."""


def find_server(arguments: argparse.Namespace) -> None:
    """If the server at DEFAULT_TARGET serves the command's model and task, set it as the target, with credentials.

    stderr says which server is used, or why the one that answers is not.
    """
    try:
        socket.create_connection(split_address(DEFAULT_TARGET), ANSWER_SECONDS).close()
    except OSError:
        return
    take_credentials(arguments)
    try:
        name, tasks = asyncio.run(_served(arguments))
    except TimeoutError:
        reason = f"does not answer within {ANSWER_SECONDS:g} s"
    except grpc.aio.AioRpcError as error:
        reason = f"answers {error.code().name}: {error.details()}"
    except ValueError as error:  # of certificates
        reason = f"cannot be called: {error}"
    else:
        reason = _why_not(arguments, name, tasks)
        if not reason:
            arguments.target = DEFAULT_TARGET
            sys.stderr.write(f"using the server at {DEFAULT_TARGET}, which serves {name!r}\n")
            return
    sys.stderr.write(f"the server at {DEFAULT_TARGET} {reason}\n")


async def _served(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    async with Client(DEFAULT_TARGET, retry_for=0, **access(arguments)) as client, asyncio.timeout(ANSWER_SECONDS):
        model = await client.get_model()
        return model.name, list(model.tasks)


def _why_not(arguments: argparse.Namespace, name: str, tasks: list[str]) -> str:
    """A model that is a folder or a file is served by its name."""
    model = arguments.model
    if model and name not in (model, (path := Path(model).expanduser().resolve()).name, path.stem):
        return f"serves {name!r}, not {model!r}"
    task = TASKS[arguments.command]
    return "" if task in tasks else f"serves {name!r}, which cannot {task}"
