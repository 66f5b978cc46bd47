"""Computes steps with CUDA graphs: a forward pass of hundreds of kernels is one launch.

On an H200, a decode step of an 8-billion-parameter Llama takes 4.5 ms with a graph, and 12.2 ms with single launches. A
graph is captured for each of a few batch sizes in rows. A row is one token, and rows may belong to one sequence, so
graphs also verify drafts and compute short prompts, but not of models with states. The largest graph is captured first,
so that the others reuse its memory. Logits and sampling are not in the graph, because their number of rows changes.

LoRA adapters add two kernels to each matrix product: 256 kernels for 32 layers. With slots for adapters, each batch
size has a graph with and a graph without adapter kernels, which share inputs and memory. One graph serves all adapters,
because kernels read slots and LoRA ranks from device memory.

If kernels support shared prefixes (`worker_service.execution.cache.shared_prefixes`), batch sizes from 8 rows also have
graphs for them, with one more launch a layer. Steps without a graph share no blocks: single launches cost more than
sharing saves."""

from array import array
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.attention.narrow_cache import is_narrow
from kernels.backends import EAGER, backend_name, ops_for
from kernels.inputs import PART_KEYS
from worker_service.execution.cache.cache_engine import CacheEngine
from worker_service.execution.cache.shared_prefixes import SharedInputs
from worker_service.execution.steps.decode_inputs import DecodeInputs, UnseenTokens
from worker_service.models.causal_model import Attention, Cache, CausalModel, GroupedCache, ModelConfig, Slots
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.layer_needs import has_one_kind, needs_of
from worker_service.progress import count_progress
from worker_service.session.sequence_state import ScheduledChunk
from worker_service.settings import WorkerSettings

_PROMPT_ROWS = 256
"""Rows of the largest graph, within `max_num_batched_tokens` and at least `max_num_seqs`. Estimate for an H200 and an
8-billion-parameter Llama, not measured: computing 512 rows takes as long as launching the kernels singly."""
_MAX_READ_AGAIN = 1 << 28
"""Bytes of a layer's keys and values that rows of a step may read repeatedly in a graph: a prompt of 360 tokens at 4
KiB a token (Llama of 8 billion parameters).

In a graph, each row reads its whole context; without a graph, attention reads a sequence's context once for several
rows. On an H200, single launches cost 0.24 ms more a layer, in which the GPU reads 1 GB. The limit is an estimate: a
quarter of 1 GB, for GPUs with less bandwidth."""

_FEWEST_SHARING = 8
"""Minimum rows of a step that shares parts of prefixes. An estimate, not measured."""
_MAX_SHARED_BYTES = 1 << 27
"""Bytes of attention's float32 results for shared parts: 32 parts for 256 rows of 32 heads of 128."""
_MIN_SAVED = 200 << 20
"""Bytes of a layer's keys and values that sharing must save. Attention to shared parts takes at least 35 µs on an H100,
because one Triton program reads all 512 keys of a part. Saving 126 MB, a layer took 38 µs instead of 28 µs; saving 235
MB, 44 µs instead of 49 µs."""

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]
"""Records a computation. Returns a function that repeats it in the same memory, and its result, which each repetition
overwrites."""


class DecodeGraphs:
    """The CUDA graphs of one model and one KV cache, whose address must not change."""

    @torch.inference_mode()
    def __init__(
        self,
        model: CausalModel,
        cache: Cache,
        max_num_rows: int,
        max_model_len: int,
        *,
        has_adapters: bool = False,
        record: Record | None = None,
    ) -> None:
        """Capture all CUDA graphs.

        max_num_rows: at least one for each sequence of a step. record: replaces the capture, in tests."""
        keys = keys_of(cache)
        block_sizes = cache.block_sizes if isinstance(cache, GroupedCache) else [cache.shape[3]]
        self._inputs = DecodeInputs(max_num_rows, max_model_len, block_sizes, keys.device)
        self._keeps_states = 0 in block_sizes
        # Bytes of a token in one layer of all ranks: every rank must choose the same graph, because an all-reduce needs
        # equally many rows, padding included.
        token_bytes = model.config.kv_parts * model.config.num_kv_heads * model.config.head_dim * keys.itemsize
        self._most_read_again = _MAX_READ_AGAIN // token_bytes
        self._shared = _shared_inputs(model, cache, block_sizes[0], max_num_rows, max_model_len)
        self._graphs: dict[tuple[int, bool, bool], tuple[Callable[[], object], Tensor]] = {}
        record = record or _CudaGraphs(keys.device)
        kinds = [
            (size, adapts, shares)
            for size in reversed(self._inputs.sizes)
            for adapts in ((True, False) if has_adapters else (False,))
            for shares in ((False,) if self._shared_at(size) is None else (True, False))
        ]
        with count_progress("capturing CUDA graphs", len(kinds)) as progress:
            for kind in kinds:
                # During the capture, all rows are padding.
                self._graphs[kind] = record(partial(self._forward, model, cache, *kind))
                progress.update()

    def fit(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Whether a graph is faster than single launches. True for every step with one token for each sequence."""
        num_rows = sum(chunk.stop - chunk.start for chunk in chunks)
        if num_rows == len(chunks):
            return True
        # Rows advance their states in any order.
        if num_rows > self._inputs.sizes[-1] or self._keeps_states:
            return False
        # Repeatedly read are the contexts of all rows but the last of each sequence.
        read_again = sum((chunk.stop - chunk.start - 1) * (chunk.start + chunk.stop) // 2 for chunk in chunks)
        size = self._inputs.size_of(num_rows)
        if read_again > self._most_read_again and (shared := self._shared_at(size)) is not None:
            found = shared.find(*_contexts(chunks), size)
            read_again -= 0 if found is None else found.num_saved
        return read_again <= self._most_read_again

    def forward(
        self, chunks: Sequence[ScheduledChunk], unseen: UnseenTokens | None, adapter_slots: Tensor | None
    ) -> Tensor:
        """Compute a step for which `fit` is true. Returns hidden states, [tokens, hidden_size], which the next call
        overwrites.

        unseen, adapter_slots: see `DecodeInputs.fill`."""
        size = self._inputs.fill(chunks, unseen, adapter_slots)
        shared = self._shared_at(size)
        shares = shared is not None and shared.fill(*_contexts(chunks), size)
        replay, hidden = self._graphs[size, adapter_slots is not None, shares]
        replay()
        return hidden[: sum(chunk.stop - chunk.start for chunk in chunks)]

    def _shared_at(self, size: int) -> SharedInputs | None:
        """The buffers for shared parts, or None if steps padded to `size` rows share no blocks."""
        if self._shared is None or size < _FEWEST_SHARING or not self._shared.most_parts(size):
            return None
        return self._shared

    def _forward(self, model: CausalModel, cache: Cache, size: int, adapts: bool, shares: bool) -> Tensor:
        shared = self._shared.tensors(size) if shares and self._shared is not None else None
        token_ids, positions, all_slots, all_metadata = self._inputs.tensors(size, shared)
        slots: Slots = all_slots
        attention: Attention = all_metadata
        if not isinstance(cache, GroupedCache):
            (slots,), (attention,) = all_slots, all_metadata
        adapter_slots = self._inputs.adapter_slots(size) if adapts else None
        return model.forward(token_ids, positions, slots, attention, cache, adapter_slots)


def keys_of(cache: Cache) -> Tensor:
    """The keys and values of a layer, or a state if no layer has keys."""
    if not isinstance(cache, GroupedCache):
        return cache[:, 0]
    keys = next((layer.blocks for layer in cache.layers if isinstance(layer.blocks, Tensor)), cache.layers[0].blocks)
    return keys if isinstance(keys, Tensor) else keys[0]


def _contexts(chunks: Sequence[ScheduledChunk]) -> "tuple[list[array[int]], list[int]]":
    """The block table of each row in the first group of layers, and the number of tokens to which each row attends."""
    tables = [chunk.sequence.block_ids for chunk in chunks for _ in range(chunk.start, chunk.stop)]
    return tables, [stop for chunk in chunks for stop in range(chunk.start + 1, chunk.stop + 1)]


def _shared_inputs(
    model: CausalModel, cache: Cache, block_size: int, max_num_rows: int, max_model_len: int
) -> SharedInputs | None:
    """The buffers for shared parts in the first group of layers, or None if kernels do not support shared parts.
    block_size: tokens of a block in this group."""
    config, keys = model.config, keys_of(cache)
    if not isinstance(config, DecoderConfig) or is_narrow(keys.dtype) or config.latent is not None:
        return None  # neither 8-bit kernels nor latents' can share parts
    if not has_one_kind(needs_of(config, config.num_kv_heads)):
        return None  # SharedInputs has one size of heads for all layers
    # Heads of the whole model, so that every rank makes the same choice. A rank with a copy of a key head could share
    # more rows.
    groups = config.num_heads // config.num_kv_heads
    most_rows = ops_for(keys.device).shared_tokens(groups, config.head_dim, keys.dtype)
    row_bytes = config.num_heads * config.head_dim * torch.float32.itemsize
    most_parts, room = (max_model_len - 1) // PART_KEYS, _MAX_SHARED_BYTES // row_bytes
    if not most_rows or not most_parts:
        return None
    # Bytes of a token in one layer of all ranks, so that every rank makes the same choice.
    token_bytes = 2 * config.num_kv_heads * config.head_dim * keys.itemsize
    least_saved = _MIN_SAVED // token_bytes
    return SharedInputs(max_num_rows, most_rows, most_parts, room, least_saved, block_size, keys.device)


class _CudaGraphs:
    """Captures CUDA graphs that share memory, which is safe because only one graph runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.CUDAGraph | None = None

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        # The first run compiles and chooses kernels and allocates memory, which a capture does not allow.
        compute()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=None if self._last is None else self._last.pool()):
            result = compute()
        self._last = graph
        return graph.replay, result


def capture(
    config: ModelConfig,
    model: CausalModel,
    cache: CacheEngine,
    settings: WorkerSettings,
    max_model_len: int,
    *,
    has_adapters: bool = False,
) -> DecodeGraphs | None:
    blocks = cache.device_blocks
    captures = isinstance(config, DecoderConfig) and blocks.is_cuda and backend_name(blocks.device) != EAGER
    if not captures or settings.enforce_eager:
        return None
    max_num_rows = max(settings.max_num_seqs, min(_PROMPT_ROWS, settings.max_num_batched_tokens))
    return DecodeGraphs(model, cache.cache, max_num_rows, max_model_len, has_adapters=has_adapters)
