"""The command line: generate, chat, embed and score, against a server or one of its own; serve OpenAI's HTTP API;
watch a cluster and drain its workers."""

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.admin_service_pb2 import WorkerState
from pagewire_client.admin import Admin, Lost
from pagewire_client.client import RETRY_SECONDS, Client, EncoderPrompt, Prompt, Sound
from pagewire_client.files import read_stdin
from pagewire_client.finished import print_requests
from pagewire_client.flag_values import folder, from_environment, given, integer_of, seconds, whole_number
from pagewire_client.local import LocalServer, ServerError
from pagewire_client.request_options import request_options, request_parser, sampling_params, sampling_parser
from pagewire_client.serve_options import add_serve
from pagewire_client.watch import watch
from pagewire_common.version import version_of

DEFAULT_ADMIN_TARGET = "localhost:50053"
POOLINGS = {"cls": pb.POOLING_CLS, "mean": pb.POOLING_MEAN, "last": pb.POOLING_LAST, "all": pb.POOLING_ALL}
DRAIN_LOOK_SECONDS = 0.5


def _sound(text: str) -> Sound:
    """Raises ArgumentTypeError for a file that cannot be read: before a server is started for it."""
    try:
        return Sound.read(Path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    tls = argparse.ArgumentParser(add_help=False)
    tls.add_argument(
        "--tls",
        metavar="FOLDER",
        type=folder,
        default=from_environment("PAGEWIRE_TLS"),
        help="connect by TLS, with its ca.crt, and its tls.crt and tls.key where the server wants a certificate. An "
        "API key is taken from the environment: PAGEWIRE_API_KEY",
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
        help="how long to wait for a --target that is not there or has no worker; 0 leaves it to the server "
        "(default %(default)g)",
    )

    parser = argparse.ArgumentParser(prog="pagewire_client", description=__doc__)
    parser.add_argument("--version", action="version", version=version_of("pagewire_client"))
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser("generate", parents=[common], help="continue a prompt")
    generate.add_argument("prompt", help="the prompt; - reads it from stdin")
    kinds = generate.add_mutually_exclusive_group()
    kinds.add_argument("--chat", action="store_true", help="put the prompt through the model's chat template")
    kinds.add_argument("--encoder", action="store_true", help="have the encoder read it that such models have")
    generate.add_argument(
        "--parse-special-tokens",
        action="store_true",
        help="read special tokens in the prompt as such: it was templated elsewhere",
    )
    chat = commands.add_parser("chat", parents=[common], help="talk with the model; Ctrl-D ends")
    chat.add_argument("--system", help="the system message")
    add_serve(commands, server)
    embed = commands.add_parser("embed", parents=[request], help="make vectors of texts: a JSON list a line")
    embed.add_argument("texts", metavar="TEXT", nargs="+")
    embed.add_argument(
        "--pooling",
        choices=POOLINGS,
        help="how the states of a text's tokens become its vector (default: the model's); all: a vector for each token",
    )
    embed.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, help="make vectors 1 long (default: the model's)"
    )
    embed.add_argument(
        "--dimensions",
        type=integer_of(pb.EmbedRequest, "dimensions"),
        default=0,
        help="leading numbers of each vector to keep; 0 for all",
    )
    embed.add_argument("--truncate", action="store_true", help="cut texts that are too long for the model")
    score = commands.add_parser("score", parents=[request], help="how well documents answer a query, the best first")
    score.add_argument("query")
    score.add_argument("documents", metavar="DOCUMENT", nargs="+")
    score.add_argument(
        "--pair-format",
        default="",
        metavar="TEXT",
        help="for models that were trained on single texts: the text of both, with {query} and {document} in it",
    )
    score.add_argument(
        "--top-n",
        type=integer_of(pb.ScoreRequest, "top_n"),
        default=0,
        help="how many of the best to show; 0 for all (default)",
    )
    score.add_argument("--truncate", action="store_true", help="cut documents that are too long for the model")
    transcribe = commands.add_parser("transcribe", parents=[request], help="write down what is said in a sound file")
    transcribe.add_argument(
        "file", type=_sound, help="WAV, FLAC, MP3, OGG, MP4 or WebM, whatever its name; at most 16 MiB"
    )
    transcribe.add_argument(
        "--language", default="", metavar="LANGUAGE", help='as "en" or "english"; found out if not given'
    )
    transcribe.add_argument("--prompt", default="", help="what was said before, or names and style to be expected")
    transcribe.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    transcribe.add_argument(
        "--seed",
        type=integer_of(pb.TranscribeRequest, "seed"),
        help="makes sampling repeatable",
    )
    transcribe.add_argument("--translate", action="store_true", help="write in English, whatever is spoken")
    transcribe.add_argument(
        "--words", action="store_true", help="a line for each word, with its times, instead of one for each segment"
    )
    _add_operators_commands(commands, tls)
    parsed = parser.parse_args(arguments)
    if parsed.command in ("generate", "chat"):
        try:
            parsed.sampling = sampling_params(parsed)
        except ValueError as error:
            parser.error(str(error))
    if getattr(parsed, "model", None) and parsed.target:
        parser.error(f"--model is for a server of the command's own; the target {parsed.target} runs already")
    if parsed.command != "new-key" and not parsed.target and parsed.command != "serve":
        parsed.retry_for = 0.0  # this command's own server is not restarted
    return parsed


def access(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a client shows to get in."""
    return {"api_key": os.environ.get("PAGEWIRE_API_KEY", ""), "tls": arguments.tls}


def _add_operators_commands(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", tls: argparse.ArgumentParser
) -> None:
    new_key = commands.add_parser("new-key", help="make an API key: it is shown once, with the lines for --api-keys")
    new_key.add_argument("id", help="its name in the logs")
    new_key.add_argument("--tenant", default="", help="the tenant of its requests")
    new_key.add_argument("--admin", action="store_true", help="may administer, and read metrics")
    common = argparse.ArgumentParser(add_help=False, parents=[tls])
    common.add_argument(
        "--target",
        metavar="HOST:PORT",
        type=given,
        default=from_environment("PAGEWIRE_ADMIN_TARGET") or DEFAULT_ADMIN_TARGET,
        help=f"a running scheduler service, at its --admin-listen (default {DEFAULT_ADMIN_TARGET})",
    )
    watch = commands.add_parser("watch", parents=[common], help="queues, workers, blocks and rates, as they change")
    watch.add_argument(
        "--interval",
        metavar="SECONDS",
        type=seconds(0.1, 60),
        default=1.0,
        help="between two looks, 0.1 to 60 (default 1)",
    )
    watch.add_argument("--once", action="store_true", help="look once")
    requests = commands.add_parser("requests", parents=[common], help="what the requests that ended last waited for")
    requests.add_argument("--limit", type=whole_number(1, 1000), default=20, help="how many, 1 to 1000 (default 20)")
    for command, text in (("drain", "give a worker no new work"), ("undrain", "give a worker work again")):
        parser = commands.add_parser(command, parents=[common], help=text)
        parser.add_argument("address", metavar="WORKER", help="HOST:PORT of the worker, as watch shows it")
        if command == "drain":
            parser.add_argument("--wait", action="store_true", help="return when the worker has nothing left")
    commands.add_parser("reset-prefix-cache", parents=[common], help="have requests find nothing of earlier prompts")
    commands.add_parser("adapters", parents=[common], help="the low-rank adapters that requests can name")
    for command, text in (
        ("load-adapter", "have requests name an adapter of --lora-dir"),
        ("unload-adapter", "have no more requests name an adapter"),
    ):
        parser = commands.add_parser(command, parents=[common], help=text)
        parser.add_argument("name", help="its name, which is that of its folder")


async def stream(client: Client, prompt: Prompt, sampling: pb.SamplingParams, **options: Any) -> str:
    """Print an answer as it comes, and then its speed; returns its text."""
    began = time.perf_counter()
    first = None
    text, num_tokens, metrics = "", 0, pb.RequestMetrics()
    async for response in client.generate(prompt, sampling, **options):
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
    text = read_stdin() if arguments.prompt == "-" else arguments.prompt
    prompt: Prompt = [{"role": "user", "content": text}] if arguments.chat else text
    if arguments.encoder:
        prompt = EncoderPrompt(text)
    options = request_options(arguments) | {"parse_special_tokens": arguments.parse_special_tokens}
    async with Client(target, retry_for=arguments.retry_for, **access(arguments)) as client:
        await stream(client, prompt, arguments.sampling, **options)


def chat(arguments: argparse.Namespace, target: str) -> None:
    """The event loop runs while the model answers and rests while the user types, so that Ctrl-C works at both."""
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []

    async def answer(conversation: Prompt) -> str:
        async with Client(target, retry_for=arguments.retry_for, **access(arguments)) as client:
            return await stream(client, conversation, arguments.sampling, **request_options(arguments))

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


def new_key(arguments: argparse.Namespace) -> None:
    """The key goes to stderr, and what may be kept to stdout: `new-key alice >> keys.toml`."""
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
    """Return when the scheduler has no session with the worker; say why, and before that how many requests it has."""
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
    """All that a scheduler knows of a worker that computes nothing for it."""
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


async def embed(arguments: argparse.Namespace, target: str) -> None:
    async with Client(target, **access(arguments)) as client:
        for embedding in await client.embed(
            arguments.texts,
            pooling=POOLINGS.get(arguments.pooling, pb.POOLING_UNSPECIFIED),
            normalize=arguments.normalize,
            dimensions=arguments.dimensions,
            truncate=arguments.truncate,
            **request_options(arguments),
        ):
            vectors = [[round(number, 7) for number in vector] for vector in embedding.vectors]
            sys.stdout.write(f"{json.dumps(vectors if arguments.pooling == 'all' else vectors[0])}\n")


async def score(arguments: argparse.Namespace, target: str) -> None:
    async with Client(target, **access(arguments)) as client:
        for number, found in await client.score(
            arguments.query,
            arguments.documents,
            top_n=arguments.top_n,
            pair_format=arguments.pair_format,
            truncate=arguments.truncate,
            **request_options(arguments),
        ):
            sys.stdout.write(f"{found:.4f}  {arguments.documents[number]}\n")


async def transcribe(arguments: argparse.Namespace, target: str) -> None:
    async with Client(target, **access(arguments)) as client:
        names = ("language", "prompt", "translate", "temperature", "seed", "words")
        options = request_options(arguments) | {name: getattr(arguments, name) for name in names}
        async for event in client.transcribe(arguments.file, **options):
            if event.HasField("segment"):
                for said in event.segment.words if arguments.words else [event.segment]:
                    times = f"{said.start_seconds:7.2f} - {said.end_seconds:7.2f}"
                    sys.stdout.write(f"{times}  {said.text.strip()}\n")
                sys.stdout.flush()


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
        case "serve":
            from pagewire_client.http.serve import serve  # its libraries are for the gateway's machine alone

            asyncio.run(serve(arguments, target, **access(arguments)))
        case "watch":
            logging.getLogger("pagewire_client").setLevel(logging.WARNING)  # the picture itself shows a lost connection
            asyncio.run(watch(target, interval=arguments.interval, once=arguments.once, **access(arguments)))
        case "requests":
            asyncio.run(requests(arguments, target))
        case "adapters" | "load-adapter" | "unload-adapter":
            asyncio.run(adapters(arguments, target))
        case "reset-prefix-cache":
            asyncio.run(reset_prefix_cache(arguments, target))
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
        if arguments.command == "new-key":
            new_key(arguments)
        elif arguments.target:
            run(arguments, arguments.target)
        else:
            os.environ.pop("PAGEWIRE_TLS", None)  # which is for a server elsewhere; these two are on this machine
            arguments.tls = None
            sys.stderr.write("starting a scheduler and a worker …\n")
            with LocalServer(arguments.model or "default") as server:
                run(arguments, server.target)
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (ServerError, ValueError, OSError) as error:
        sys.exit(f"pagewire_client: {error}")
    except grpc.aio.AioRpcError as error:
        sys.exit(f"pagewire_client: {error.code().name}: {error.details()}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
