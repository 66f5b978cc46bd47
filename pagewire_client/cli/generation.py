"""The commands `generate` and `chat`: print text as it is generated, then the speed of generation."""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import grpc

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client.cli.flag_values import access
from pagewire_client.cli.request_options import request_options
from pagewire_client.client import Client
from pagewire_client.files import read_stdin
from pagewire_client.prompts import EncoderPrompt, Image, Prompt

MIN_RATE_SECONDS = 0.1
"""A shorter stream is a burst, whose rate says nothing: four tokens within a millisecond are 3,000 tokens/s."""


async def stream(client: Client, prompt: Prompt, sampling: pb.SamplingParams, **options: Any) -> str:
    """Returns the answer's text."""
    began = time.perf_counter()
    first, num_first = None, 0
    text, num_tokens, metrics = "", 0, pb.RequestMetrics()
    async for response in client.generate(prompt, sampling, **options):
        if first is None:
            first, num_first = time.perf_counter(), len(response.token_ids)
        num_tokens += len(response.token_ids)
        text += response.text
        sys.stdout.write(response.text)
        sys.stdout.flush()
        metrics = response.metrics  # the last message contains the metrics
    ended = time.perf_counter()
    sys.stdout.write("\n")
    sys.stdout.flush()
    first = first or ended
    rate = token_rate(num_tokens - num_first, ended - first)
    waits = f"{metrics.queued_seconds:.2f} s of it queued; longest pause {metrics.longest_pause_seconds:.2f} s"
    sys.stderr.write(f"[{num_tokens} tokens, first after {first - began:.2f} s, {waits}{rate}]\n")
    return text


def token_rate(num_tokens: int, seconds: float) -> str:
    """The rate of the tokens that came after the first message, as the end of a line; empty for a burst."""
    return f"; {num_tokens / seconds:.1f} tokens/s" if seconds >= MIN_RATE_SECONDS else ""


async def generate(arguments: argparse.Namespace, target: str) -> None:
    text = read_stdin() if arguments.prompt == "-" else arguments.prompt
    content = [*arguments.image, text] if arguments.image else text
    prompt: Prompt = [{"role": "user", "content": content}] if arguments.chat else content
    if arguments.encoder:
        prompt = EncoderPrompt(text)
    options = request_options(arguments) | {"parse_special_tokens": arguments.parse_special_tokens}
    async with Client(target, retry_for=arguments.retry_for, **access(arguments)) as client:
        await stream(client, prompt, arguments.sampling, **options)


def chat(arguments: argparse.Namespace, target: str) -> None:
    """The event loop runs only while the model answers, so Ctrl-C also ends a wait for the user's input."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": arguments.system}] if arguments.system else []

    async def answer(conversation: Prompt) -> str:
        async with Client(target, retry_for=arguments.retry_for, **access(arguments)) as client:
            return await stream(client, conversation, arguments.sampling, **request_options(arguments))

    images: list[Image] = arguments.image  # in the first question
    for line in _lines():
        question = {"role": "user", "content": [*images, line] if images else line}
        try:
            text = asyncio.run(answer([*messages, question]))
        except grpc.aio.AioRpcError as error:
            sys.stderr.write(f"{error.details()}\n")  # the conversation continues without the failed turn
        else:
            messages += [question, {"role": "assistant", "content": text}]
            images = []


def _lines() -> Iterator[str]:
    with contextlib.suppress(EOFError):
        while True:
            if line := input("> " if sys.stdin.isatty() else "").strip():
                yield line
