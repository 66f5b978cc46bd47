"""Compares served log-probabilities with exact ones: python -m bench fidelity. The last line is JSON.

All systems score the same texts with teacher forcing: each token's log-probability, and the likeliest token.
transformers in float32, with the same weights, is exact. Figures: the mean difference of log-probabilities, how often
the likeliest tokens are equal, and the increase of perplexity.

Systems: pagewire in bfloat16 with a bfloat16 and an int8 cache, and with the quantised weights for which the machine
has kernels; transformers in bfloat16, to which ratios are relative; with --peer, vLLM. pagewire's fp8 cache needs a
GPU, so transformers with keys and values rounded to fp8 stands for it.

Texts are the first tokens of pages of Python's manual, which every Python contains. --prompts adds a JSON-lines file
with members `turns`, as in MT-bench.
"""

import argparse
import asyncio
import json
import math
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from bench.loads.drive import BenchError
from bench.systems.peer_vllm import MODEL, vllm_on_cpu
from kernels.attention.narrow_cache import narrowed, widened
from kernels.float8 import FLOAT8
from pagewire_client import Client, LocalServer, SamplingParams, ServerError
from pagewire_client.llm import collect
from pagewire_common.connection.channel import direct_opener
from pagewire_common.settings import load_settings
from pagewire_common.start_error import StartError
from worker_service.loading.model_store import find_model
from worker_service.models.layers.linear import Quantization, can_pack
from worker_service.settings import WorkerSettings

TOPICS = ("types", "import", "formatstrings", "compound", "specialnames", "assert", "exprlists", "numbers")
WINDOW = 512
"""Tokens of a text."""
CACHE_GIB = 2
BASE = "transformers, bfloat16"


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of all tokens of a text except the first, and the likeliest tokens."""

    logprobs: list[float]
    likeliest: list[int]


@dataclass(frozen=True)
class Fidelity:
    """A system's difference from the exact scores, over all tokens."""

    mean_difference: float
    """Mean absolute difference of log-probabilities."""
    same_likeliest: float
    """Percentage of positions with the same likeliest token."""
    perplexity: float
    """Increase in percent."""


def compare(found: Sequence[Scores], exact: Sequence[Scores]) -> Fidelity:
    """Raises BenchError if the scores of a text are incomplete."""
    differences: list[float] = []
    losses: list[float] = []
    same = 0
    for ours, truth in zip(found, exact, strict=True):
        if len(ours.logprobs) != len(truth.logprobs) or len(ours.likeliest) != len(truth.likeliest):
            raise BenchError(f"a text has scores of {len(ours.logprobs)} tokens, not of {len(truth.logprobs)}")
        losses += [b - a for a, b in zip(ours.logprobs, truth.logprobs, strict=True)]
        differences += map(abs, losses[len(differences) :])
        same += sum(a == b for a, b in zip(ours.likeliest, truth.likeliest, strict=True))
    count = len(differences)
    return Fidelity(sum(differences) / count, 100 * same / count, 100 * math.expm1(sum(losses) / count))


class _CacheInFp8(DynamicCache):  # type: ignore[misc]  # transformers has no type annotations
    """Keys and values rounded to e4m3."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        kept = (widened(narrowed(heads, FLOAT8), heads.dtype) for heads in (key_states, value_states))
        found: tuple[Tensor, Tensor] = super().update(*kept, *args, **options)
        return found


def transformers_scores(
    directory: Path,
    texts: Iterable[list[int]],
    dtype: torch.dtype,
    make_cache: Callable[[], DynamicCache] = DynamicCache,
) -> list[Scores]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    scores = []
    for text in texts:
        with torch.inference_mode():
            logprobs = model(torch.tensor([text]), past_key_values=make_cache()).logits[0, :-1].float().log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(text[1:])[:, None]).squeeze(1)
        scores.append(Scores(chosen.tolist(), logprobs.argmax(-1).tolist()))
    return scores


def our_scores(directory: Path, texts: Sequence[list[int]], *flags: str) -> list[Scores]:
    """pagewire's scores: a new scheduler and a new worker compute one text after the other."""

    async def ask() -> list[Scores]:
        sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        async with Client(server.target) as client:
            completions = [await collect(client, text, sampling) for text in texts]
        return [
            Scores(
                [entry.chosen.logprob for entry in completion.prompt_logprobs],
                [entry.top[0].token_id for entry in completion.prompt_logprobs],
            )
            for completion in completions
        ]

    arguments = ["--dtype", "bfloat16", "--kv-cache-memory", str(CACHE_GIB), "--max-model-len", "2048", *flags]
    with LocalServer(str(directory), worker_arguments=arguments) as server:
        return asyncio.run(ask())


def vllm_scores(url: str, texts: Iterable[list[int]]) -> list[Scores]:
    scores = []
    for text in texts:
        body = {"model": MODEL, "prompt": text, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        request = urllib.request.Request(  # noqa: S310  # the URL of the server that the benchmark started
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with direct_opener().open(request, timeout=300) as response:
            (choice,) = json.load(response)["choices"]
        scores.append(scores_of(choice["prompt_logprobs"], text))
    return scores


def scores_of(entries: Sequence[dict[str, dict[str, Any]] | None], text: Sequence[int]) -> Scores:
    """Scores from vLLM's entries, each a map of token ids to log-probabilities. The first has no entry."""
    known = [entry or {} for entry in entries[1:]]
    return Scores(
        [entry[str(token)]["logprob"] for entry, token in zip(known, text[1:], strict=True)],
        [int(next(token for token, score in entry.items() if score["rank"] == 1)) for entry in known],
    )


def read_texts(directory: Path, prompts: Path | None) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = [topics[topic] for topic in TOPICS if topic in topics]
    if prompts is not None:
        texts += [turn for line in prompts.read_text().splitlines() for turn in json.loads(line)["turns"]]
    tokens = [tokenizer.encode(text).ids[:WINDOW] for text in texts]
    return [text for text in tokens if len(text) > 1]


def run(model: str, peer: Path | None, prompts: Path | None) -> tuple[dict[str, Fidelity], int]:
    """Each system's fidelity, and the number of scored tokens."""
    cache = load_settings(WorkerSettings, "bench", []).cache.expanduser()
    directory = peer / "model" if peer else find_model(model, cache).path
    texts = read_texts(directory, prompts)
    exact = transformers_scores(directory, texts, torch.float32)
    found = {
        "pagewire, bfloat16": our_scores(directory, texts),
        BASE: transformers_scores(directory, texts, torch.bfloat16),
        "pagewire, int8 cache": our_scores(directory, texts, "--kv-cache-dtype", "int8"),
        f"{BASE}, fp8 cache": transformers_scores(directory, texts, torch.bfloat16, _CacheInFp8),
    }
    schemes: tuple[Quantization, ...] = ("fp8", "int8", "w8a8", "int4")
    for scheme in schemes:
        if can_pack(torch.device("cpu"), torch.bfloat16, scheme):
            found[f"pagewire, {scheme} weights"] = our_scores(directory, texts, "--quantization", scheme)
    if peer:
        with vllm_on_cpu(peer, CACHE_GIB) as vllm:
            found[f"{vllm.name} {vllm.version}, bfloat16"] = vllm_scores(vllm.url, texts)
    return {name: compare(scores, exact) for name, scores in found.items()}, sum(len(text) - 1 for text in texts)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench fidelity", description="Compares log-probabilities with exact ones.")
    parser.add_argument("--model", default="default", help="as for a worker; by default with --peer, the peer's")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="a folder with venv/, which can run vLLM, and model/")
    parser.add_argument("--prompts", type=Path, metavar="JSONL", help="more texts: the `turns` of each line")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        fidelities, num_tokens = run(arguments.model, arguments.peer, arguments.prompts)
    except (BenchError, ServerError, StartError, ValueError, KeyError, OSError) as error:
        sys.exit(f"bench fidelity: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    base = fidelities[BASE].mean_difference
    table = Table("system", "mean difference", "ratio", "same likeliest token", "perplexity", box=MARKDOWN)
    for name, fidelity in fidelities.items():
        table.add_row(
            name,
            f"{fidelity.mean_difference:.4f}",
            f"{fidelity.mean_difference / base:.2f}",
            f"{fidelity.same_likeliest:.2f}%",
            f"{fidelity.perplexity:+.2f}%",
        )
    Console(file=sys.stdout, width=200).print(table)
    report = {
        "tokens": num_tokens,
        "mean_difference": {name: fidelity.mean_difference for name, fidelity in fidelities.items()},
        "same_likeliest_percent": {name: fidelity.same_likeliest for name, fidelity in fidelities.items()},
        "ratios": {name: fidelity.mean_difference / base for name, fidelity in fidelities.items()},
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
