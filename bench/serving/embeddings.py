"""Compares the texts per second and vectors of the Embed call and of sentence-transformers, on the same cores in turn.

python -m bench embeddings MODEL [--tokens 16,128,512,mixed] [--texts 512] [--rounds 3] [--peer FOLDER]

MODEL is a folder that both can read, such as all-MiniLM-L6-v2. Texts are random words, of one length or, in `mixed`, of
any up to the model's longest. sentence-transformers receives all in one call and sorts them by length. If it is not
installed, install it for `--peer`: `pip install --target FOLDER --no-deps sentence-transformers scikit-learn scipy`,
with its missing requirements.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from pagewire_client import Client, LocalServer

MIXED = "mixed"


def make_texts(tokenizer: Any, lengths: Sequence[int], seed: int) -> list[str]:
    """Random words of one token each. `lengths` include special tokens."""
    draw = random.Random(seed)
    words = [word for word in sorted(tokenizer.get_vocab()) if word.isascii() and word.isalpha() and word.islower()]
    around = tokenizer.num_special_tokens_to_add()
    texts = [" ".join(draw.choices(words, k=length - around)) for length in lengths]
    assert [len(ids) for ids in tokenizer(texts)["input_ids"]] == list(lengths)
    return texts


def rate(compute: Callable[[], object], num_texts: int) -> float:
    began = time.perf_counter()
    compute()
    return num_texts / (time.perf_counter() - began)


def measure(model: str, target: str, kinds: Sequence[str], num_texts: int, rounds: int) -> None:
    """Print a line for each kind of texts."""
    from sentence_transformers import SentenceTransformer

    peer = SentenceTransformer(model, device="cpu")
    longest = peer.get_max_seq_length() or 512
    write = sys.stdout.write
    write(f"{torch.get_num_threads()} threads each; texts a second, ours and sentence-transformers', {rounds} rounds\n")
    for kind in kinds:
        draw = random.Random(7)
        lengths = [draw.randint(4, longest) if kind == MIXED else min(int(kind), longest) for _ in range(num_texts)]

        async def embed(texts: Sequence[str]) -> list[Any]:
            async with Client(target) as client:
                return await client.embed(texts)

        ours, theirs, difference = [], [], 0.0
        for number in range(rounds + 1):
            texts = make_texts(peer.tokenizer, lengths, number)
            found: list[Any] = []
            ours.append(rate(lambda: found.extend(asyncio.run(embed(texts))), num_texts))  # noqa: B023
            expected: list[Any] = []
            theirs.append(rate(lambda: expected.extend(peer.encode(texts, convert_to_tensor=True)), num_texts))  # noqa: B023
            for one, other in zip(found, expected, strict=True):
                difference = max(difference, (torch.tensor(list(one.vector)) - other.cpu()).abs().max().item())
        ratios = [a / b for a, b in zip(ours[1:], theirs[1:], strict=True)]  # the first round is a warm-up, so omitted
        length = kind if kind == MIXED else f"{lengths[0]} tokens"
        write(
            f"{length:>10}: {statistics.median(ours[1:]):7.1f} and {statistics.median(theirs[1:]):7.1f}, ratio "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); vectors differ by "
            f"{difference:.1e} at most\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", default="16,128,512,mixed")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--peer", type=Path)
    arguments = parser.parse_args()
    if arguments.peer is not None:
        sys.path.append(str(arguments.peer))
    torch.set_num_threads(psutil.cpu_count(logical=False) or 1)
    with LocalServer(str(arguments.model), worker_arguments=["--dtype", arguments.dtype]) as server:
        measure(str(arguments.model), server.target, arguments.tokens.split(","), arguments.texts, arguments.rounds)


if __name__ == "__main__":
    main()
