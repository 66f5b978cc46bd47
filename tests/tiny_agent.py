"""A model with random weights whose chat template has thinking and tools, and services that serve it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chat_templates import HERMES
from tiny_model import write_byte_tokenizer, write_marked_tokenizer, write_tiny_llama

from pagewire_client import LocalServer

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""Tokens of the model beside single bytes."""


def write_agent(directory: Path) -> Path:
    """A checkpoint with a context of 2,048 tokens.

    The model is unlikely to write whitespace, which a form would let it repeat, and unlikely to begin thinking.
    """
    write_byte_tokenizer(directory / "bytes")
    tokenizer = write_marked_tokenizer(directory / "tokenizer", directory / "bytes", MARKS, HERMES)
    unlikely = [tokenizer(text).input_ids[-1] for text in (*" \t\n\r<", MARKS[0])]
    sizes = {"vocab_size": 259 + len(MARKS), "max_position_embeddings": 2048}
    write_tiny_llama(directory / "tiny-agent", directory / "tokenizer", unlikely=unlikely, **sizes)
    return directory / "tiny-agent"


@contextmanager
def serve_agent(directory: Path) -> Iterator[LocalServer]:
    with LocalServer(
        str(write_agent(directory)),
        worker_arguments=[
            *("--num-gpu-blocks-override", "256", "--block-size", "8", "--threads", "1", "--swap-space", "0"),
            "--forms",
        ],
        scheduler_arguments=["--check-invariants"],
    ) as server:
        yield server
