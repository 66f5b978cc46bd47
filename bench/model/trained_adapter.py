"""Tests a served adapter that is trained on codes which the base model cannot know.

python -m bench trained_adapter [--model default] [--steps 150] [--rank 8]

PEFT trains on sentences that each assign a code to a word, in a few minutes on two CPU cores. A server then completes
all sentences at once, with and without the adapter, and the right codes are counted.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import collect
from worker_service.loading.model_store import find_model

WORDS = ("apple", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor", "island", "jacket", "kettle",
         "ladder", "mirror", "needle", "orange", "pencil")  # fmt: skip
LEARNING_RATE = 2e-3


def sentences() -> dict[str, str]:
    """Beginnings of sentences, each with the code that completes it."""
    draw = random.Random(1)
    return {f"The code of the {word} is": f" {draw.randrange(1000, 10_000)}" for word in WORDS}


def train(model: str, folder: Path, steps: int, rank: int) -> None:
    import peft
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    path = find_model(model, Path("~/.cache/pagewire").expanduser()).path
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    network = peft.get_peft_model(base, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    texts = [torch.tensor([tokenizer.encode(begin + end + ".").ids]) for begin, end in sentences().items()]
    optimizer = torch.optim.AdamW([one for one in network.parameters() if one.requires_grad], lr=LEARNING_RATE)
    draw = random.Random(0)
    for step in range(1, steps + 1):
        loss = sum(network(text, labels=text).loss for text in draw.sample(texts, 4)) / 4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            sys.stderr.write(f"step {step}: loss {loss.item():.3f}\n")
    network.save_pretrained(str(folder))


async def count_right(target: str, lora_name: str) -> int:
    """Sentences that the served model completes with the right code, all sent at once."""
    async with Client(target) as client:
        await client.wait_until_serving(600)
        sampling = SamplingParams(max_tokens=8, temperature=0)
        wanted = sentences()
        found = await asyncio.gather(*(collect(client, begin, sampling, lora_name=lora_name) for begin in wanted))
    return sum(one.outputs[0].text.startswith(code) for one, code in zip(found, wanted.values(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rank", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        train(arguments.model, Path(folder) / "codes", arguments.steps, arguments.rank)
        sys.stdout.write(f"trained in {time.monotonic() - began:.0f} s\n")
        with LocalServer(
            arguments.model,
            worker_arguments=["--max-loras", "1", "--max-lora-rank", str(arguments.rank), "--no-forms"],
            scheduler_arguments=["--lora-dir", folder],
        ) as server:
            for lora_name, name in (("", "the base"), ("codes", "the adapter")):
                right = asyncio.run(count_right(server.target, lora_name))
                sys.stdout.write(f"{name:11}: {right} of {len(WORDS)} codes are right\n")


if __name__ == "__main__":
    main()
