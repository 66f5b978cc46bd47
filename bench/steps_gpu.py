"""Compares a worker's decode steps with the GPU's memory bandwidth: python -m bench.steps_gpu [--model NAME]

The last line is JSON. A model's shape (default: Llama 3.1 8B's) with random bf16 weights, 1, 32 and 256 sequences with
1,024 tokens of context. A step includes the session's work, the batch, the CUDA graph, greedy sampling and the copy of
the tokens to the host, but no protobuf or gRPC. Its limit is the time to read weights, keys and values once, at the
copy bandwidth of the same run; of experts, the mean number that the tokens of the step choose.

Times are from the end of the previous step to the end of the step; all figures are medians. "step": launched before the
previous step has finished, as when a scheduler sends steps ahead. "alone": launched after it.

The second table has steps with one of four adapters of rank 16 for each sequence, and steps that verify four wrong
drafts of each (launched alone). The third has steps with a prompt, or its uncached rest, and the decodes of 31
sequences. All are printed for the fastest kernels and for `--batch-invariant`, with its cost for decodes and prompts.
"""

import argparse
import json
import statistics
import sys
import time
from array import array
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from bench.gpu.shapes import SHAPES, step_bytes
from bench.kernels_gpu import copy_bandwidth
from worker_service.execution.adapters.adapters import AdapterRoom, Adapters
from worker_service.execution.cache.cache_engine import CacheEngine, CacheShape
from worker_service.execution.startup.profiling import measure_prefill
from worker_service.execution.steps.decode_graphs import DecodeGraphs
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.execution.steps.running_step import RunningStep
from worker_service.loading.adapter import Adapter
from worker_service.loading.dummy_weights import DummyWeights
from worker_service.models.causal_model import CausalModel
from worker_service.models.registry import build_model, read_config
from worker_service.session.session import Session
from worker_service.session.step import TOKENS, Limits, NewSequence, SamplingParams, SchedulerOutput

BATCHES = (1, 32, 256)
CONTEXT = 1024
NUM_STEPS = 24
NUM_DRAFTS = 4


class Prompt(NamedTuple):
    """Its uncached tokens are computed in one step."""

    num_tokens: int
    behind: int
    """Leading tokens that were computed in earlier steps."""


PROMPTS = (Prompt(32, 0), Prompt(128, 0), Prompt(224, 0), Prompt(32, CONTEXT), Prompt(224, CONTEXT))
BESIDE = 31
ROOM = AdapterRoom(num_slots=4, max_rank=16, max_loaded=4)
BLOCK_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench steps_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="llama-8b")
    shape = SHAPES[parser.parse_args().model]
    if not torch.cuda.is_available():
        sys.exit("bench steps_gpu measures steps on an NVIDIA GPU, and torch finds none on this machine.")
    device = torch.device("cuda")
    bandwidth = copy_bandwidth(device)
    say(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}: copy {bandwidth / 1e9:.0f} GB/s")
    found = {}
    for name, batch_invariant in (("fastest", False), ("batch_invariant", True)):
        torch.cuda.empty_cache()
        say(f"kernels: {name}")
        found[name] = measure_worker(shape, device, bandwidth, batch_invariant=batch_invariant)
    fastest, invariant = found.values()
    costs = {"prompts": fastest["prefill_tokens_per_second"] / invariant["prefill_tokens_per_second"]}
    for one, other in zip(fastest["steps"], invariant["steps"], strict=True):
        costs[f"{one['batch']} sequences"] = other["step_ms"] / one["step_ms"]
    for what, ratio in costs.items():
        say(f"--batch-invariant, {what}: {ratio - 1:+.1%} of time")
    say(json.dumps({"device": torch.cuda.get_device_name(device), "copy_bytes_per_second": bandwidth, **found}))


def measure_worker(
    model_shape: Mapping[str, Any], device: torch.device, bandwidth: float, *, batch_invariant: bool
) -> dict[str, Any]:
    """Print the tables of one worker, and return the figures."""
    config = read_config(model_shape)
    model = build_model(config, torch.bfloat16, device, batch_invariant=batch_invariant)
    tensors = model.checkpoint_tensors()
    DummyWeights(device).load_into(tensors)
    adapters = random_adapters(model)
    model.pack()
    shape = CacheShape(config.num_layers, BLOCK_SIZE, config.num_kv_heads, config.head_dim, torch.bfloat16)
    blocks_each = -(-(CONTEXT + max(NUM_STEPS + 1 + NUM_DRAFTS, *(one.num_tokens for one in PROMPTS))) // BLOCK_SIZE)
    limits = Limits(BLOCK_SIZE, max(BATCHES) * blocks_each, 0, config.vocabulary_size, 8192, 2048, max(BATCHES))
    speed = measure_prefill(model, shape, device, limits.max_num_batched_tokens, 1)
    engine = CacheEngine(shape, limits.num_device_blocks, 0, device)
    for part in torch.split(engine.device_blocks, 512):
        part.normal_()
    began = time.perf_counter()
    graphs = DecodeGraphs(
        model,
        engine.device_blocks,
        limits.max_num_seqs,
        limits.max_model_len,
        has_adapters=True,
    )
    capture_seconds = time.perf_counter() - began
    say(f"graphs captured in {capture_seconds:.1f} s; prompts {speed} tokens/s")
    say(f"{'sequences':>9}{'limit':>10}{'step':>10}{'ratio':>7}{'alone':>10}{'ratio':>7}{'alone, without graphs':>23}")
    results: list[dict[str, float]] = []
    replayed, launched = (ModelRunner(model, engine, of_one, adapters=adapters) for of_one in (graphs, None))
    for batch in BATCHES:
        step = measure(replayed, limits, batch, ahead=True)
        alone = measure(replayed, limits, batch)
        eager = measure(launched, limits, batch)
        limit = 1e3 * step_bytes(model_shape, batch, CONTEXT + NUM_STEPS / 2) / bandwidth
        say(
            f"{batch:>9}{limit:>7.2f} ms{step:>7.2f} ms{step / limit:>7.2f}{alone:>7.2f} ms{alone / limit:>7.2f}"
            f"{eager:>20.2f} ms"
        )
        results.append({"batch": batch, "limit_ms": limit, "step_ms": step, "alone_ms": alone, "eager_ms": eager})
    say(f"{'sequences':>9}{'adapters':>12}{'without graphs':>16}{'drafts':>12}{'without graphs':>16}")
    for result, batch in zip(results, BATCHES, strict=True):
        for name, num_drafts in (("adapters", 0), ("guesses", NUM_DRAFTS)):
            for way, runner in (("", replayed), ("_eager", launched)):
                result[f"{name}{way}_ms"] = measure(
                    runner, limits, batch, has_adapters=not num_drafts, num_drafts=num_drafts
                )
        say(
            f"{batch:>9}{result['adapters_ms']:>9.2f} ms{result['adapters_eager_ms']:>13.2f} ms"
            f"{result['guesses_ms']:>9.2f} ms{result['guesses_eager_ms']:>13.2f} ms"
        )
    say(f"{'prompt':>9}{'behind':>9}{'31 decodes':>13}{'without graphs':>16}")
    mixed: list[dict[str, float]] = []
    for prompt in PROMPTS:
        step = measure(replayed, limits, BESIDE, ahead=True, prompt=prompt)
        eager = measure(launched, limits, BESIDE, prompt=prompt)
        say(f"{prompt.num_tokens:>9}{prompt.behind:>9}{step:>10.2f} ms{eager:>13.2f} ms")
        mixed.append(prompt._asdict() | {"step_ms": step, "eager_ms": eager})
    return {"prefill_tokens_per_second": speed, "steps": results, "with_prompts": mixed}


def random_adapters(model: CausalModel) -> Adapters:
    """One for each slot, named by its number, with weights for all linear layers."""
    adapters = Adapters(model, ROOM)
    for number in range(ROOM.num_slots):
        adapters.add(
            str(number),
            Adapter({
                name: (
                    torch.randn(ROOM.max_rank, inputs, dtype=adapters.dtype) / 100,
                    torch.randn(outputs, ROOM.max_rank, dtype=adapters.dtype) / 100,
                )
                for name, (outputs, inputs) in adapters.shapes.items()
            }),
        )  # fmt: skip
    return adapters


def measure(
    runner: ModelRunner,
    limits: Limits,
    batch: int,
    *,
    ahead: bool = False,
    has_adapters: bool = False,
    num_drafts: int = 0,
    prompt: Prompt | None = None,
) -> float:
    """Median milliseconds from the end of a step to the end of the next.

    `num_drafts` are for each sequence. `prompt` is an additional sequence of each step, removed after it.
    """
    session = Session(1, limits)
    blocks = torch.randperm(limits.num_device_blocks, generator=torch.Generator().manual_seed(0))
    tables = blocks.view(max(BATCHES), -1).tolist()
    decodes = tuple(
        NewSequence(
            sequence_id=number,
            token_ids=array(TOKENS, range(CONTEXT)),
            num_prompt_tokens=CONTEXT - 1,
            num_computed_tokens=CONTEXT - 1,
            block_ids=array(TOKENS, table),
            sampling=SamplingParams(),
            adapter=str(number % ROOM.num_slots) if has_adapters else "",
        )
        for number, table in enumerate(tables[:batch])
    )
    ids, counts = tuple(range(batch)), (1 + num_drafts,) * batch
    rooms = (num_drafts,) * batch if num_drafts else ()
    running: RunningStep | None = None
    ends = []
    for step_id in range(1, NUM_STEPS + 1):
        new = decodes if step_id == 1 else ()
        output = SchedulerOutput(1, step_id, new, ids, counts, (True,) * batch, num_draft_tokens=rooms)
        if prompt is not None:
            output = with_prompt(output, prompt, tables[batch])
        assert step_id == 1 or num_drafts or session.follows_unseen(output)
        if running is not None and not ahead:
            ends.append(finish(session, running))
            running = None
        chunks = session.apply(output)  # every draft is the token 0
        before, running = running, runner.launch(output, chunks, running)
        session.advance(chunks)
        if before is not None:
            ends.append(finish(session, before))
    return 1e3 * statistics.median(later - earlier for earlier, later in pairwise(ends[4:]))


def with_prompt(output: SchedulerOutput, prompt: Prompt, table: list[int]) -> SchedulerOutput:
    """The step with the prompt as a new sequence, in the blocks of the previous step's prompt."""
    number, last = BESIDE + output.step_id, prompt.behind + prompt.num_tokens
    new = NewSequence(
        sequence_id=number,
        token_ids=array(TOKENS, range(last)),
        num_prompt_tokens=last,
        num_computed_tokens=prompt.behind,
        block_ids=array(TOKENS, table),
        sampling=SamplingParams(),
    )
    return replace(
        output,
        new_sequences=(*output.new_sequences, new),
        sequence_ids=(*output.sequence_ids, number),
        num_scheduled_tokens=(*output.num_scheduled_tokens, prompt.num_tokens),
        samples=(*output.samples, True),
        finished=(number - 1,) if output.step_id > 1 else (),
    )


def finish(session: Session, running: RunningStep) -> float:
    """The time at which a launched step finished."""
    answer = running.finish()
    session.fill_in(running.chunks, answer.token_ids, answer.num_tokens)
    return time.perf_counter()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
