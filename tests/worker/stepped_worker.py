"""A worker without its service, stepped by hand, and its oracle: transformers in float32.

On a GPU if there is one, where native networks replay CUDA graphs.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from causal_networks import auto_class_of
from fake_decode_graphs import MAX_NUM_ROWS
from grouped_steps import GroupedSteps
from torch import Tensor
from worker_helpers import LIMITS, new_sequence, tokens

from worker_service.execution.adapters.adapters import AdapterRoom, Adapters
from worker_service.execution.cache.cache_engine import CacheEngine, CacheShape
from worker_service.execution.cache.layer_groups import group_layers
from worker_service.execution.startup.network import NO_ADAPTERS
from worker_service.execution.steps.decode_graphs import DecodeGraphs
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.loading.checkpoint import Checkpoint
from worker_service.models.causal_model import GroupedCache
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.decoders.shard import part_of
from worker_service.models.layer_needs import has_one_kind, needs_of
from worker_service.models.layers.linear import Quantization
from worker_service.models.registry import build_model, read_config
from worker_service.parallel.ranks import ALONE, Ranks
from worker_service.session.items import PromptItem
from worker_service.session.sequence_state import ScheduledChunk
from worker_service.session.session import Session
from worker_service.session.step import (
    TOKENS,
    BlockMapping,
    BlockTableUpdate,
    LayerLimits,
    Limits,
    ModelOutput,
    NewSequence,
    SchedulerOutput,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPT = [(7 * number * number + 3) % 131 for number in range(37)]


def load_runner(
    path: Path,
    graphs: bool = True,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization = "none",
    ranks: Ranks = ALONE,
    room: AdapterRoom = NO_ADAPTERS,
    cache_dtype: torch.dtype | None = None,
    *,
    batch_invariant: bool = False,
    limits: Limits = LIMITS,
) -> ModelRunner:
    """A runner over a pool that is NaN where nothing was stored. `graphs`: where possible. `ranks`, `batch_invariant`:
    native networks only. `room`: for adapters. `cache_dtype`: the pool's, if different. `limits`: of the pool, and
    with groups of layers if the model's windows differ.
    """
    checkpoint = Checkpoint(path)
    config = read_config(checkpoint.config)
    config = config.untied(checkpoint.own(config.tied))
    model = build_model(config, dtype, DEVICE, ranks, batch_invariant=batch_invariant)
    num_kv_heads, cuts = part_of(config, ranks)
    checkpoint.load_into(model.checkpoint_tensors(), cuts)
    checkpoint.check_none_left({*model.checkpoint_tensors(), *config.tied}, config.ignored_tensors)
    adapters = Adapters(model, room, cuts)
    model.pack(quantization)
    sizes = config.num_layers, LIMITS.block_size, num_kv_heads, config.head_dim
    shape = CacheShape(*sizes, cache_dtype or dtype, kv_parts=config.kv_parts, state_dtype=dtype)
    needs = needs_of(config, num_kv_heads)
    if limits.layer_groups or not has_one_kind(needs):
        groups = group_layers(needs, LIMITS.block_size, limits.max_model_len, dtype, cache_dtype)
        shape = replace(shape, groups=groups)
        if limits.layer_groups:
            assert [(group.block_size, group.window, group.chunked) for group in shape.groups] == [*limits.layer_groups]
    tables = 1 if limits.layer_groups else max(1, len(shape.groups))  # see `GroupedSteps`
    engine = CacheEngine(shape, tables * limits.num_device_blocks, tables * limits.num_host_blocks, DEVICE)
    for pool in (engine.device_blocks, engine.host_blocks):
        make_nan(pool)
    decode_graphs = None
    if graphs and DEVICE.type == "cuda" and isinstance(config, DecoderConfig):
        decode_graphs = DecodeGraphs(
            model,
            engine.cache,
            MAX_NUM_ROWS,
            LIMITS.max_model_len,
            has_adapters=room.num_slots > 0,
        )
    return ModelRunner(model, engine, decode_graphs, adapters=adapters)


def make_nan(blocks: Tensor) -> None:
    """8-bit caches have NaN scales. Bytes of ones are NaN in every floating type."""
    blocks.fill_(-1 if blocks.dtype is torch.int8 else 255 if blocks.dtype is torch.uint8 else float("nan"))


class SteppedWorker:
    def __init__(self, runner: ModelRunner, limits: Limits = LIMITS) -> None:
        self.runner = runner
        self.limits = limits
        engine = runner.cache_engine
        self._grouped = GroupedSteps(engine, limits)
        if isinstance(engine.cache, GroupedCache) and not limits.layer_groups:
            limits = replace(limits, layer_groups=tuple(LayerLimits(size, 0) for size in engine.cache.block_sizes))
        self.session = Session(1, limits)
        self.step_id = 0

    def step(self, *scheduled: tuple[int, int, bool], **output: Any) -> ModelOutput:
        """Compute (sequence, number of tokens, whether it samples) of each, in one step."""
        self.step_id += 1
        ids, counts, samples = zip(*scheduled, strict=True) if scheduled else ((), (), ())
        return self.execute(
            SchedulerOutput(1, self.step_id, sequence_ids=ids, num_scheduled_tokens=counts, samples=samples, **output)
        )

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        step = self._grouped.of(step)
        return self._compute(step, self.session.apply(step))

    def forget_blocks(self, blocks: range) -> None:
        """Fill blocks with NaN."""
        pool = self.runner.cache_engine.device_blocks
        tables = len(pool) // self.limits.num_device_blocks
        make_nan(pool[blocks.start * tables : blocks.stop * tables])

    def verify(self, guesses: Mapping[int, Sequence[int]]) -> ModelOutput:
        """Compute the next token of each sequence, and its drafts."""
        self.step_id += 1
        rooms = tuple(map(len, guesses.values()))
        step = SchedulerOutput(
            1, self.step_id, (), tuple(guesses), tuple(1 + room for room in rooms), (True,) * len(rooms),
            num_draft_tokens=rooms,
        )  # fmt: skip
        chunks = self.session.apply(step)
        drafts = (array(TOKENS, guessed) for guessed in guesses.values())
        return self._compute(step, [chunk.with_drafts(of_one) for chunk, of_one in zip(chunks, drafts, strict=True)])

    def _compute(self, step: SchedulerOutput, chunks: Sequence[ScheduledChunk]) -> ModelOutput:
        answer = self.runner.execute(step, chunks)
        self.session.advance(chunks)
        self.session.fill_in(chunks, answer.token_ids, answer.num_tokens)
        return answer

    def generate(self, sequence_id: int, count: int) -> list[int]:
        """Decode alone."""
        return [self.step((sequence_id, 1, True)).token_ids[0] for _ in range(count)]

    def prompt_logprobs(self, chunk_lens: list[int], items: tuple[PromptItem, ...] = ()) -> Tensor:
        """The log-softmax at every position of PROMPT but the last, [len(PROMPT) - 1, vocabulary_size]."""
        rows: list[list[float]] = []
        size = LIMITS.vocabulary_size
        new: dict[str, tuple[NewSequence, ...]] = {
            "new_sequences": (new_sequence(1, PROMPT, range(20, 32), items=items, prompt_logprobs=size),)
        }
        for chunk_len in chunk_lens:
            (report,) = self.step((1, chunk_len, False), **new).prompt_logprobs or (None,)
            new = {}
            if report is not None:
                for start in range(0, len(report.token_ids), report.width):
                    entries = slice(start + 1, start + 1 + size)
                    by_id = sorted(zip(report.token_ids[entries], report.logprobs[entries], strict=True))
                    rows.append([logprob for _, logprob in by_id])
        return torch.tensor(rows)


class Oracle:
    """A checkpoint in transformers."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoConfig

        auto_class = auto_class_of(AutoConfig.from_pretrained(path))
        self._model = auto_class.from_pretrained(path, dtype=dtype, attn_implementation="eager")

    def logprobs(self, token_ids: list[int]) -> Tensor:
        """The log-softmax at every position, [len(token_ids), vocabulary_size]."""
        with torch.inference_mode():
            return self._model(torch.tensor([token_ids]), use_cache=False).logits[0].float().log_softmax(-1)

    @torch.inference_mode()
    def embed(self, token_ids: list[int]) -> Tensor:
        """What the network reads in place of token ids, [len(token_ids), size]."""
        return self._model.get_input_embeddings()(torch.tensor(token_ids))

    @torch.inference_mode()
    def logprobs_behind(self, embeddings: Tensor) -> Tensor:
        """The log-softmax at every position of a text of embeddings, [len(embeddings), vocabulary_size]."""
        return self._model(inputs_embeds=embeddings[None], use_cache=False).logits[0].float().log_softmax(-1)

    def greedy(self, token_ids: list[int], count: int) -> list[int]:
        """The continuation, token by token, without a cache."""
        known = list(token_ids)
        for _ in range(count):
            known.append(int(self.logprobs(known)[-1].argmax()))
        return known[len(token_ids) :]


def generate_with_everything(worker: SteppedWorker, count: int) -> tuple[list[int], list[int]]:
    """Tokens after PROMPT, and 4 after its first 20 tokens, through chunks, a batch, preemption and swapping. Another
    sequence has the first token from blocks of these 20 tokens, whose states have been kept in a copy."""
    found = list(worker.step((1, 30, False), new_sequences=(new_sequence(1, PROMPT, range(13)),)).token_ids)
    late = new_sequence(2, PROMPT[:20], range(20, 26))
    both = [
        worker.step((1, 7, True), (2, 11, False), new_sequences=(late,)).token_ids,
        worker.step((2, 9, True), (1, 1, True)).token_ids[::-1],
        worker.step((1, 1, True), (2, 1, True), blocks_to_copy=BlockMapping((20,), (44,))).token_ids,
        *(worker.step((1, 1, True), (2, 1, True)).token_ids for _ in range(2)),
    ]
    found += [step[0] for step in both]

    worker.step(preempted=(1,))
    back = new_sequence(1, PROMPT + found, range(30, 43), num_prompt_tokens=len(PROMPT))
    found += worker.step((1, len(PROMPT) + len(found), True), new_sequences=(back,)).token_ids
    found += worker.generate(1, 3)

    worker.step(finished=(2,))
    held = -(-(len(PROMPT) + len(found)) // 4)
    worker.step(blocks_to_swap_out=BlockMapping(tuple(range(30, 38)), tuple(range(8))))
    worker.forget_blocks(range(30, 38))
    table = [*range(50, 58), *range(38, 43), 60]
    assert held <= len(table)
    found += worker.step(
        (1, 1, True),
        blocks_to_swap_in=BlockMapping(tuple(range(8)), tuple(range(50, 58))),
        block_table_updates=(BlockTableUpdate(1, 0, tokens(table)),),
    ).token_ids
    cached = new_sequence(3, PROMPT, [44, *range(21, 25), *range(45, 50)], num_computed_tokens=20)
    again = worker.step((3, len(PROMPT) - 20, True), new_sequences=(cached,)).token_ids
    assert [*again] == found[:1], f"from the prefix cache, the first token is {again[0]}"
    worker.step(finished=(3,))
    return found + worker.generate(1, count - len(found)), [step[1] for step in both[1:]]
