"""A worker of two ranks behind a real scheduler: the tokens of a worker that is alone, and a place beside it."""

import asyncio
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import psutil
import pytest
from cluster import cluster_state
from lora_helpers import KINDS, NAMES, Asked, all_together
from prompts import PROMPTS
from tiny_adapters import write_adapter
from tiny_model import write_tiny_llama

from pagewire_client import Client, LocalServer, PromptEmbeds, SamplingParams
from pagewire_client.admin import Admin
from pagewire_client.llm import collect
from pagewire_client.local import ServiceProcess

SMALL_POOL = (
    "--dtype",
    "float32",
    "--num-gpu-blocks-override",
    "18",
    "--max-model-len",
    "256",
    "--swap-space",
    "0.002",
)
"""For twelve sequences at once that end with two or three blocks, so that some must make room."""
EMBEDDINGS = np.random.default_rng(0).normal(0, 0.2, (40, 72)).astype(np.float32)
TWO_RANKS = ("--tensor-parallel-size", "2")
NGRAMS = ("--speculative-config", '{"method": "ngram"}')


async def completions(target: str) -> list[list[list[int]]]:
    """The tokens of each output, greedy and drawn, of short prompts that all run at once, and of two that run alone:
    one repeats itself, and one is of embeddings."""

    def sampling(number: int) -> SamplingParams:
        drawn = {"n": 2, "temperature": 0.8, "top_p": 0.95, "seed": number} if number % 2 else {"temperature": 0}
        return SamplingParams(max_tokens=24, ignore_eos=True, **drawn)

    prompts = sorted(PROMPTS, key=len)[:8]
    async with Client(target) as client:
        done = await asyncio.gather(*(collect(client, text, sampling(number)) for number, text in enumerate(prompts)))
        alone = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
        done.append(await collect(client, "one two three one two three one two", alone))
        done.append(await collect(client, PromptEmbeds.of(EMBEDDINGS), alone))
    return [[output.token_ids for output in completion.outputs] for completion in done]


async def test_a_model_of_the_default_models_heads_says_the_same_in_two_ranks(
    byte_tokenizer_directory: Path, tmp_path: Path
) -> None:
    """Nine heads and three for keys and values, so that the parts are unequal. What the first rank guesses, the other
    verifies as well."""
    heads = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
    write_tiny_llama(tmp_path / "tiny-llama", byte_tokenizer_directory, **heads)
    model = str(tmp_path / "tiny-llama")
    scheduler = ["--preemption-mode", "swap", "--check-invariants", "--enable-prompt-embeds"]
    with LocalServer(model, worker_arguments=SMALL_POOL, scheduler_arguments=scheduler) as alone:
        expected = await completions(alone.target)
    for guessing in ((), NGRAMS):
        ranked = [*SMALL_POOL, *TWO_RANKS, *guessing]
        with LocalServer(model, worker_arguments=ranked, scheduler_arguments=scheduler) as ranks:
            for _ in range(10):  # a busy machine guesses only now and then, for it may not be worth it
                assert await completions(ranks.target) == expected
                (worker,) = (await cluster_state(ranks.admin_target)).workers
                if not guessing or worker.num_guessed_tokens:
                    break
            assert worker.num_preemptions
            assert bool(worker.num_guessed_tokens) == bool(guessing)


async def test_requests_of_adapters_say_the_same_in_two_ranks(
    tiny_model_directory: Path, adapters: Path, tmp_path: Path
) -> None:
    """Of three in turn and the base, in two slots; and of one that is loaded while others run."""
    asked: list[Asked] = list(product(PROMPTS[:1], NAMES, (KINDS["greedy"], KINDS["several"])))
    late: Asked = ("abc", "late", {"temperature": 0})
    few = ("--max-loras", "2", "--dtype", "float32", "--num-gpu-blocks-override", "40", "--threads", "1")
    found = []
    for ranks in ((), (*TWO_RANKS, *NGRAMS)):
        folder = Path(shutil.copytree(adapters, tmp_path / f"{len(ranks)} arguments"))
        with LocalServer(
            str(tiny_model_directory),
            worker_arguments=[*few, *ranks],
            scheduler_arguments=["--lora-dir", str(folder), "--preemption-mode", "swap", "--check-invariants"],
        ) as server:
            write_adapter(folder / "late", 7)
            async with Client(server.target) as client, Admin(server.admin_target) as admin:
                together = asyncio.create_task(all_together(client, asked))
                await admin.load_adapter("late")
                found.append([*await together, *await all_together(client, [late])])
            (worker,) = (await cluster_state(server.admin_target)).workers
            assert not worker.num_losses
    assert found[0] == found[1]


@pytest.fixture
def services() -> Iterator[list[ServiceProcess]]:
    processes: list[ServiceProcess] = []
    yield processes
    for process in processes:
        process.process.kill()
        process.stop()


async def test_streams_of_a_worker_that_loses_a_rank_go_on_in_another_that_has_none(
    services: list[ServiceProcess], tiny_model_directory: Path, adapters: Path
) -> None:
    """Of the base and of adapters."""
    names = ["", "one", "two"] * 2
    model = ("--listen", "127.0.0.1:0", "--model", str(tiny_model_directory))
    sizes = (
        "--num-gpu-blocks-override",
        "64",
        "--block-size",
        "8",
        "--threads",
        "1",
        "--swap-space",
        "0",
        "--max-loras",
        "2",
    )
    services += (ServiceProcess("worker_service", [*model, *sizes, *ranks]) for ranks in (TWO_RANKS, ()))
    addresses = [str(process.wait_for("listening", 60)["address"]) for process in services]
    for process in services:
        process.wait_for("ready", 60)
    services.append(
        ServiceProcess("scheduler_service", [*model, "--workers", ",".join(addresses), "--lora-dir", str(adapters)])
    )
    sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=5, ignore_eos=True)
    async with Client(str(services[2].wait_for("listening", 60)["address"])) as client:
        await client.wait_until_serving(60)
        asked = list(zip(PROMPTS, names, strict=False))
        completions = await asyncio.gather(*(collect(client, text, sampling, lora_name=name) for text, name in asked))
        undisturbed = [completion.outputs[0].token_ids for completion in completions]
        some_tokens = [asyncio.Event() for _ in undisturbed]

        async def tokens(number: int) -> list[int]:
            found: list[int] = []
            text, name = asked[number]
            async for message in client.generate(text, sampling, lora_name=name):
                found += message.token_ids
                if len(found) > 5:
                    some_tokens[number].set()
            return found

        streams = [asyncio.create_task(tokens(number)) for number in range(len(undisturbed))]
        for event in some_tokens:
            await event.wait()
        psutil.Process(services[0].process.pid).children()[1].kill()
        assert await asyncio.gather(*streams) == undisturbed
    assert await asyncio.to_thread(services[0].process.wait, 20) == 1
