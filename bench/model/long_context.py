"""Compares the perplexity of one long text with transformers', and measures its KV cache with and without groups of
layers: python -m bench long_context --model DIR [--tokens 8192]. The last line is JSON.

Both systems compute in float32. The text is from Python's manual, which every Python contains. transformers reads it in
chunks through its cache, because the logits of 8,192 tokens and 262,144 words take 8.6 GB. The KV cache is the largest
number of blocks in use, asked of the scheduler while the text is computed.
"""

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache

from bench.loads.drive import BenchError
from bench.systems.pagewire_system import Pagewire
from bench.systems.processes import end_on_signals
from pagewire_client import Client, SamplingParams, ServerError
from pagewire_client.llm import collect
from pagewire_common.settings import load_settings
from pagewire_common.start_error import StartError
from worker_service.loading.model_store import find_model
from worker_service.settings import WorkerSettings

CACHE_GIB = 4
CHUNK = 512
"""Tokens that transformers reads at a time."""
POLL_SECONDS = 0.02
WHOLE_CONTEXTS = "--disable-hybrid-kv-cache-manager"


def read_text(directory: Path, num_tokens: int) -> list[int]:
    tokenizer, text = Tokenizer.from_file(str(directory / "tokenizer.json")), list[int]()
    for topic in cycle(sorted(topics)):
        text += tokenizer.encode(topics[topic]).ids
        if len(text) >= num_tokens:
            return text[:num_tokens]
    raise AssertionError


@torch.inference_mode()
def transformers_logprobs(directory: Path, text: Sequence[int]) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    cache, found = DynamicCache(config=model.config), list[float]()
    for start in range(0, len(text) - 1, CHUNK):
        tokens = torch.tensor([text[start : start + CHUNK + 1]])
        logprobs = model(tokens[:, :CHUNK], past_key_values=cache).logits[0].log_softmax(-1)
        following = tokens[0, 1:]
        found += logprobs[: len(following)].gather(1, following[:, None]).squeeze(1).tolist()
    return found


def our_logprobs(directory: Path, text: list[int], *flags: str) -> tuple[list[float], float]:
    """Log-probabilities, and the largest KV cache in MiB."""

    async def ask(system: Pagewire) -> tuple[list[float], float]:
        sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        async with Client(system.target) as client:
            answer, most = asyncio.create_task(collect(client, text, sampling)), 0
            while not answer.done():
                most = max(most, await system.used_bytes())
                await asyncio.sleep(POLL_SECONDS)
            return [entry.chosen.logprob for entry in answer.result().prompt_logprobs], most / 2**20

    with Pagewire(directory, CACHE_GIB, *flags, context=len(text) + 1, dtype="float32") as system:
        return asyncio.run(ask(system))


def perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


def run(model: str, num_tokens: int) -> dict[str, float]:
    cache = load_settings(WorkerSettings, "bench", []).cache.expanduser()
    directory = find_model(model, cache).path
    text = read_text(directory, num_tokens)
    ours, mib = our_logprobs(directory, text)
    _, whole_mib = our_logprobs(directory, text, WHOLE_CONTEXTS)
    theirs = transformers_logprobs(directory, text)
    if len(ours) != len(theirs):
        raise BenchError(f"pagewire has log-probabilities of {len(ours)} tokens, and transformers of {len(theirs)}")
    return {
        "tokens": num_tokens,
        "perplexity": perplexity(ours),
        "perplexity of transformers": perplexity(theirs),
        "largest difference of a log-probability": max(abs(a - b) for a, b in zip(ours, theirs, strict=True)),
        "KV cache, MiB": mib,
        "KV cache without groups of layers, MiB": whole_mib,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="as for a worker")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text (default 8192)")
    arguments = parser.parse_args()
    end_on_signals()
    try:
        found = run(arguments.model, arguments.tokens)
    except (BenchError, ServerError, StartError, ValueError, OSError) as error:
        sys.exit(f"bench long_context: {error}")
    sys.stdout.write("".join(f"| {name} | {value:,.7g} |\n" for name, value in found.items()))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
