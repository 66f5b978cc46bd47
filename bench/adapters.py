"""What adapters cost: the same requests to one server, of the base model and of 1, 4 and 16 adapters, in turn.

    python -m bench.adapters [--model default] [--sequences 16,32] [--rank 16] [--adapters 1,4,16] [--rounds 3]

The adapters are random, of all linear layers. Requests are dealt out among them. The last line says how long the first
token took of an adapter that had no slot on the device, beside one that had.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.load import CONTEXT
from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import collect
from worker_service.loading.checkpoint import Checkpoint
from worker_service.loading.model_store import find_model
from worker_service.models.decoder import Decoder
from worker_service.models.decoder_config import DecoderConfig
from worker_service.models.registry import read_config

OUTPUT_TOKENS = 128
PROMPT_TOKENS = 128
TIMES = 18


def write_adapters(folder: Path, model: str, count: int, rank: int) -> None:
    """Folders a0, a1 …, as PEFT writes them."""
    config = read_config(Checkpoint(find_model(model, Path("~/.cache/pagewire").expanduser()).path).config)
    if not isinstance(config, DecoderConfig):
        raise SystemExit("bench.adapters: this model does not run natively")
    places = Decoder(config, torch.float32, torch.device("meta")).allocate_lora(1, rank)
    for number in range(count):
        draw = torch.Generator().manual_seed(number)
        tensors = {}
        for name, place in places.items():
            module = f"base_model.model.{name}"
            inputs = place.weights.a.shape[3]
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw) * 0.02
            tensors[f"{module}.lora_B.weight"] = torch.randn(place.num_outputs, rank, generator=draw) * 0.02
        (folder / f"a{number}").mkdir()
        save_file(tensors, folder / f"a{number}" / "adapter_model.safetensors")
        (folder / f"a{number}" / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank})
        )


async def rate(client: Client, num_sequences: int, names: Sequence[str], seed: int) -> float:
    """Output tokens a second of so many streams at once."""
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0)

    async def one(number: int) -> None:
        prompt = [1000 + (number * 7919 + seed * 104729 + i * 31) % 20000 for i in range(PROMPT_TOKENS)]
        await collect(client, prompt, sampling, lora_name=names[number % len(names)])

    began = time.perf_counter()
    await asyncio.gather(*map(one, range(num_sequences)))
    return num_sequences * OUTPUT_TOKENS / (time.perf_counter() - began)


async def first_token_seconds(client: Client, names: Sequence[str]) -> float:
    """The median over requests of one token, each alone and of the next of these adapters."""
    found = []
    for number in range(TIMES):
        began = time.perf_counter()
        await collect(client, [1000 + number] * 16, SamplingParams(max_tokens=1), lora_name=names[number % len(names)])
        found.append(time.perf_counter() - began)
    return statistics.median(found)


async def measure(target: str, sequences: Sequence[int], counts: Sequence[int], rounds: int) -> None:
    async with Client(target) as client:
        await client.wait_until_serving(600)
        loads = {"base": [""], **{f"{count} adapters": [f"a{number}" for number in range(count)] for count in counts}}
        for num_sequences in sequences:
            rates: dict[str, list[float]] = {name: [] for name in loads}
            for number in range(rounds):
                first = number % len(loads)
                for name in (*list(loads)[first:], *list(loads)[:first]):
                    rates[name].append(await rate(client, num_sequences, loads[name], number))
            for name, found in rates.items():
                ratio = statistics.median(mine / base for mine, base in zip(found, rates["base"], strict=True))
                median = statistics.median(found)
                sys.stdout.write(f"{num_sequences:3} sequences, {name:11}: {median:7.1f} tok/s, {ratio:.2f} x base\n")
                sys.stdout.flush()
        many = [
            f"a{number}" for number in range(max(counts) + 1)
        ]  # one more than slots: each has lost its own by its turn
        there, elsewhere = [1e3 * await first_token_seconds(client, names) for names in (many[:1], many)]
        sys.stdout.write(
            f"first token: {there:.0f} ms of an adapter in a slot, {elsewhere:.0f} ms of one that is copied\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--sequences", default="16,32")
    parser.add_argument("--adapters", default="1,4,16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.adapters.split(",")]
    sequences = [int(count) for count in arguments.sequences.split(",")]
    common = ["--max-model-len", str(CONTEXT), "--kv-cache-memory", "1", "--no-forms"]
    room = ["--max-loras", str(max(counts)), "--max-lora-rank", str(arguments.rank)]
    with tempfile.TemporaryDirectory() as folder:
        write_adapters(Path(folder), arguments.model, max(counts) + 1, arguments.rank)
        with LocalServer(
            arguments.model, worker_arguments=[*common, *room], scheduler_arguments=["--lora-dir", folder]
        ) as server:
            asyncio.run(measure(server.target, sequences, counts, arguments.rounds))


if __name__ == "__main__":
    main()
