"""The command line: generate and chat, against a server or one of its own; serve OpenAI's HTTP API; watch a cluster,
drain its workers."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator

import grpc

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.admin import Admin
from pagewire_client.client import RETRY_SECONDS, Client, Prompt
from pagewire_client.finished import print_requests
from pagewire_client.gateway import Gateway
from pagewire_client.local import LocalServer, ServerError
from pagewire_client.watch import watch

DEFAULT_TARGET = "localhost:50051"
DEFAULT_HTTP_LISTEN = "127.0.0.1:8000"
READY_SECONDS = 600.0

TRY_IT = """\
OpenAI's API is at {url}/v1; Ctrl-C ends it. Try:

curl {url}/v1/chat/completions -H 'content-type: application/json' \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'

"""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    server = argparse.ArgumentParser(add_help=False)
    server.add_argument(
        "--target",
        metavar="HOST:PORT",
        default=os.environ.get("PAGEWIRE_TARGET"),
        help="a running scheduler service; without one, both services are started here for this command",
    )
    server.add_argument("--model", default="default", help="what to serve when no --target is given")
    common = argparse.ArgumentParser(add_help=False, parents=[server])
    common.add_argument(
        "--retry-for",
        metavar="SECONDS",
        type=float,
        default=RETRY_SECONDS,
        help="how long to try to reach a --target again that is not there; 0 for not at all (default %(default)g)",
    )
    common.add_argument("--max-tokens", type=int, default=512, help="most tokens to generate (default 512)")
    common.add_argument("--temperature", type=float, help="0 takes the likeliest token (default: the model's)")
    common.add_argument("--top-k", type=int)
    common.add_argument("--top-p", type=float)
    common.add_argument("--seed", type=int, help="makes sampling repeatable")
    common.add_argument("--stop", action="append", default=[], help="text that ends the output; may be repeated")

    parser = argparse.ArgumentParser(prog="pagewire_client", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser("generate", parents=[common], help="continue a prompt")
    generate.add_argument("prompt", help="the prompt; - reads it from stdin")
    generate.add_argument("--chat", action="store_true", help="put the prompt through the model's chat template")
    chat = commands.add_parser("chat", parents=[common], help="talk with the model; Ctrl-D ends")
    chat.add_argument("--system", help="the system message")
    serve = commands.add_parser("serve", parents=[server], help="serve OpenAI's HTTP API")
    serve.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default=os.environ.get("PAGEWIRE_HTTP_LISTEN", DEFAULT_HTTP_LISTEN),
        help=f"where HTTP is served (default {DEFAULT_HTTP_LISTEN})",
    )
    _add_operators_commands(commands)
    parsed = parser.parse_args(arguments)
    if not parsed.target and parsed.command != "serve":
        parsed.retry_for = 0.0  # this command's own server is not restarted
    return parsed


def _add_operators_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--target",
        metavar="HOST:PORT",
        default=os.environ.get("PAGEWIRE_TARGET", DEFAULT_TARGET),
        help=f"a running scheduler service (default {DEFAULT_TARGET})",
    )
    watch = commands.add_parser("watch", parents=[common], help="queues, workers, blocks and rates, as they change")
    watch.add_argument(
        "--interval", metavar="SECONDS", type=float, default=1.0, help="between two looks, 0.1 to 60 (default 1)"
    )
    watch.add_argument("--once", action="store_true", help="look once")
    requests = commands.add_parser("requests", parents=[common], help="what the requests that ended last waited for")
    requests.add_argument("--limit", type=int, default=20, help="how many, 1 to 1000 (default 20)")
    for command, text in (("drain", "give a worker no new work"), ("undrain", "give a worker work again")):
        parser = commands.add_parser(command, parents=[common], help=text)
        parser.add_argument("address", metavar="WORKER", help="HOST:PORT of the worker, as watch shows it")


def sampling_params(arguments: argparse.Namespace) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stop=arguments.stop,
    )


async def stream(client: Client, prompt: Prompt, sampling: pb.SamplingParams) -> str:
    """Print an answer as it comes, and then its speed; returns its text."""
    began = time.perf_counter()
    first = None
    text, num_tokens, metrics = "", 0, pb.RequestMetrics()
    async for response in client.generate(prompt, sampling):
        first = first or time.perf_counter()
        num_tokens += len(response.token_ids)
        text += response.text
        sys.stdout.write(response.text)
        sys.stdout.flush()
        metrics = response.metrics  # of the last one
    ended = time.perf_counter()
    sys.stdout.write("\n")
    sys.stdout.flush()
    first = first or ended
    rate = f"{(num_tokens - 1) / (ended - first):.1f} tokens/s" if num_tokens > 1 and ended > first else "one token"
    waits = f"{metrics.queued_seconds:.2f} s of it queued; longest pause {metrics.longest_pause_seconds:.2f} s"
    sys.stderr.write(f"[{num_tokens} tokens, first after {first - began:.2f} s, {waits}; {rate}]\n")
    return text


async def generate(arguments: argparse.Namespace, target: str) -> None:
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    prompt: Prompt = [{"role": "user", "content": text}] if arguments.chat else text
    async with Client(target, retry_for=arguments.retry_for) as client:
        await stream(client, prompt, sampling_params(arguments))


def chat(arguments: argparse.Namespace, target: str) -> None:
    """The event loop runs while the model answers and rests while the user types, so that Ctrl-C works at both."""
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []

    async def answer(conversation: Prompt) -> str:
        async with Client(target, retry_for=arguments.retry_for) as client:
            return await stream(client, conversation, sampling_params(arguments))

    for line in _lines():
        question = {"role": "user", "content": line}
        try:
            text = asyncio.run(answer([*messages, question]))
        except grpc.aio.AioRpcError as error:
            sys.stderr.write(f"{error.details()}\n")  # the conversation goes on without this turn
        else:
            messages += [question, {"role": "assistant", "content": text}]


def _lines() -> Iterator[str]:
    """The user's input, line by line, until it ends."""
    with contextlib.suppress(EOFError):
        while True:
            if line := input("> " if sys.stdin.isatty() else "").strip():
                yield line


def serve(arguments: argparse.Namespace, target: str) -> None:
    """Until a signal comes, or the gateway ends."""
    model = asyncio.run(_served_model(target))
    with Gateway(target, arguments.listen) as gateway:
        gateway.wait_until_ready(READY_SECONDS)
        sys.stderr.write(TRY_IT.format(url=gateway.url, model=model))
        status = gateway.process.wait()
    raise ServerError(f"the gateway ended with status {status}")


async def _served_model(target: str) -> str:
    """The model's name, once there is one: the gateway looks for it only once, when it starts."""
    async with Client(target) as client:
        await client.wait_until_serving()
        return (await client.get_model()).name


async def requests(arguments: argparse.Namespace, target: str) -> None:
    async with Admin(target) as admin:
        print_requests(await admin.finished_requests(arguments.limit))


async def drain(arguments: argparse.Namespace, target: str) -> None:
    async with Admin(target) as admin:
        await (admin.drain if arguments.command == "drain" else admin.undrain)(arguments.address)


def run(arguments: argparse.Namespace, target: str) -> None:
    match arguments.command:
        case "generate":
            asyncio.run(generate(arguments, target))
        case "chat":
            chat(arguments, target)
        case "serve":
            serve(arguments, target)
        case "watch":
            logging.getLogger("pagewire_client").setLevel(logging.WARNING)  # the picture itself shows a lost connection
            asyncio.run(watch(target, interval=arguments.interval, once=arguments.once))
        case "requests":
            asyncio.run(requests(arguments, target))
        case _:
            asyncio.run(drain(arguments, target))


def main() -> None:
    arguments = parse_arguments()
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("pagewire_client").setLevel(logging.INFO)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # line editing for input()
    for number in (signal.SIGTERM, signal.SIGHUP):  # end as for Ctrl-C, and stop the processes that were started
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        if arguments.target:
            run(arguments, arguments.target)
        else:
            sys.stderr.write("starting a scheduler and a worker …\n")
            with LocalServer(arguments.model) as server:
                run(arguments, server.target)
    except (ServerError, ValueError) as error:
        sys.exit(f"pagewire_client: {error}")
    except grpc.aio.AioRpcError as error:
        sys.exit(f"pagewire_client: {error.code().name}: {error.details()}")
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
