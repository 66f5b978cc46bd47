"""The flags of operators' commands."""

import argparse

from pagewire_client.cli.flag_values import from_environment, given, seconds, whole_number

DEFAULT_ADMIN_TARGET = "localhost:50053"


def add_operators_commands(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", tls: argparse.ArgumentParser
) -> None:
    new_key = commands.add_parser("new-key", help="create an API key, and show it once, with its lines for --api-keys")
    new_key.add_argument("id", help="the key's name in the logs")
    new_key.add_argument("--tenant", default="", help="the tenant of the key's requests")
    new_key.add_argument("--admin", action="store_true", help="allow operators' commands and reading metrics")
    common = argparse.ArgumentParser(add_help=False, parents=[tls])
    common.add_argument(
        "--target",
        metavar="HOST:PORT",
        type=given,
        default=from_environment("PAGEWIRE_ADMIN_TARGET") or DEFAULT_ADMIN_TARGET,
        help=f"a running scheduler service, at its --admin-listen (default {DEFAULT_ADMIN_TARGET})",
    )
    watch = commands.add_parser(
        "watch", parents=[common], help="show queues, workers, blocks and rates, as they change"
    )
    watch.add_argument(
        "--interval",
        metavar="SECONDS",
        type=seconds(0.1, 60),
        default=1.0,
        help="time between two updates, 0.1 to 60 (default 1)",
    )
    watch.add_argument("--once", action="store_true", help="show the state once")
    requests = commands.add_parser(
        "requests", parents=[common], help="list the requests that ended last, with their waiting times"
    )
    requests.add_argument(
        "--limit", type=whole_number(1, 1000), default=20, help="number of requests, 1 to 1000 (default 20)"
    )
    for command, text in (("drain", "give a worker no new work"), ("undrain", "give a worker work again")):
        parser = commands.add_parser(command, parents=[common], help=text)
        parser.add_argument("address", metavar="WORKER", help="HOST:PORT of the worker, as watch shows it")
        if command == "drain":
            parser.add_argument("--wait", action="store_true", help="wait until the worker has no requests left")
    commands.add_parser("reset-prefix-cache", parents=[common], help="empty the prefix cache")
    commands.add_parser("adapters", parents=[common], help="list the low-rank adapters that requests can name")
    for command, text in (
        ("load-adapter", "load an adapter from --lora-dir, so that requests can name it"),
        ("unload-adapter", "unload an adapter, so that new requests cannot name it"),
    ):
        parser = commands.add_parser(command, parents=[common], help=text)
        parser.add_argument("name", help="the adapter's name, which is its folder's name")
