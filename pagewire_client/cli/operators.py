"""Operators' commands: drain workers, load adapters, empty the prefix cache, list ended requests, create API keys."""

import argparse
import hashlib
import json
import re
import secrets
import sys

from pagewire.v1.admin_service_pb2 import WorkerState
from pagewire_client.admin import Admin, Lost
from pagewire_client.cli.finished import print_requests
from pagewire_client.cli.flag_values import access

DRAIN_LOOK_SECONDS = 0.5


def new_key(arguments: argparse.Namespace) -> None:
    """Print an API key to stderr, and its lines for the file of keys to stdout: `new-key alice >> keys.toml`."""
    for name, value in (("id", arguments.id), ("--tenant", arguments.tenant)):
        if not re.fullmatch(r"[\w.@:-]{0,64}", value) or (name == "id" and not value):
            raise ValueError(f"{name} is {value!r}; it may have up to 64 letters, digits and . @ : - _")
    key = f"pw-{secrets.token_urlsafe(32)}"
    sys.stderr.write(f"the key, which is not kept anywhere: {key}\n")
    digest = hashlib.sha256(key.encode()).hexdigest()
    entry = {"id": arguments.id, "tenant": arguments.tenant, "sha256": digest, "admin": arguments.admin}
    lines = [f"{name} = {json.dumps(value)}" for name, value in entry.items()]
    sys.stdout.write("\n".join(["[[key]]", *lines, "", ""]))


async def requests(arguments: argparse.Namespace, target: str) -> None:
    async with Admin(target, **access(arguments)) as admin:
        print_requests(await admin.finished_requests(arguments.limit))


async def drain(arguments: argparse.Namespace, target: str) -> None:
    async with Admin(target, **access(arguments)) as admin:
        if arguments.command == "undrain":
            await admin.undrain(arguments.address)
            sys.stdout.write(f"{arguments.address} is given requests again\n")
            return
        await admin.drain(arguments.address)
        sys.stdout.write(f"{arguments.address} is given no more requests\n")
        if arguments.wait:
            await _until_drained(admin, arguments.address)


async def _until_drained(admin: Admin, address: str) -> None:
    """Wait until the scheduler has no session with a drained worker, and print the worker's remaining requests."""
    said = ""
    async for event in admin.watch(DRAIN_LOOK_SECONDS):
        if isinstance(event, Lost):
            sys.stderr.write(f"connection lost, trying again: {event.reason}\n")
            continue
        worker = next((one for one in event.state.workers if one.address == address), None)
        if worker is None or not worker.connected:
            sys.stdout.write(f"{_without_session(worker, address)}\n")
            return
        if not worker.draining:
            raise ValueError(f"{address} was undrained meanwhile")
        if (line := f"{worker.num_running} running and {worker.num_swapped} swapped out there") != said:
            said = line
            sys.stderr.write(f"{line}\n")


def _without_session(worker: WorkerState | None, address: str) -> str:
    if worker is None:
        return f"{address} has left: the scheduler's list of workers does not have it"
    reason = worker.last_error or "none was opened since the scheduler started"
    return f"{address} has no request of this scheduler, which has no session with it: {reason}"


async def adapters(arguments: argparse.Namespace, target: str) -> None:
    async with Admin(target, **access(arguments)) as admin:
        match arguments.command:
            case "load-adapter":
                await admin.load_adapter(arguments.name)
            case "unload-adapter":
                await admin.unload_adapter(arguments.name)
        for adapter in await admin.adapters():
            sys.stdout.write(f"{adapter.name}  {adapter.num_bytes / 2**20:.1f} MiB  {adapter.fingerprint}\n")


async def reset_prefix_cache(arguments: argparse.Namespace, target: str) -> None:
    async with Admin(target, **access(arguments)) as admin:
        sys.stdout.write(f"{await admin.reset_prefix_cache()} blocks could be found, and now none can\n")
