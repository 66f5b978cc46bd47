"""Computes steps with CUDA graphs: a forward pass of hundreds of kernels is one launch.

On an H200, a decode step of an 8-billion-parameter Llama takes 4.5 ms with a graph. If Python launches each kernel, the
same decode step takes 12.2 ms. A graph is captured for each of a few batch sizes, counted in rows. Each token of a step
is one row, and rows may belong to the same sequence. The graphs therefore also compute steps that verify drafts, and
steps with short prompts or with the end of a prompt. The largest graph is captured first, so that the other graphs
reuse its memory. Logits and sampling are not part of a graph, because the number of rows that sample changes from step
to step.

LoRA adapters add two kernels to each matrix product, which makes 256 kernels in a forward pass of 32 layers. If a
worker has slots for adapters, each batch size has a graph with adapter kernels and a graph without them. Steps without
adapters use the graph without adapter kernels. The graphs of a batch size share inputs and memory. Each additional
graph costs the time of its capture, and memory of the driver for its launches. One graph serves all adapters, because
its kernels read adapter slots and LoRA ranks from device memory.

If kernels support shared prefixes (`worker_service.execution.cache.shared_prefixes`), each batch size of 8 rows and
more has two graphs. The graph for shared prefixes has one more launch in each layer, and computes steps whose rows
share enough blocks. The graph without sharing computes all other steps. The rows of a short question that follows a
long cached prompt also share the prompt's blocks. Steps without a graph do not share blocks, because launching kernels
one by one costs more time than sharing could save.
"""

from array import array
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.attention.metadata import PART_KEYS
from kernels.attention.narrow_cache import is_narrow
from kernels.backends import EAGER, backend_name, ops_for
from worker_service.execution.cache.cache_engine import CacheEngine
from worker_service.execution.cache.shared_prefixes import SharedInputs
from worker_service.execution.steps.decode_inputs import DecodeInputs, UnseenTokens
from worker_service.models.causal_model import CausalModel, ModelConfig
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.progress import count_progress
from worker_service.session.session import ScheduledChunk
from worker_service.settings import WorkerSettings

_PROMPT_ROWS = 256
"""Number of rows of the largest graph, unless `max_num_batched_tokens` is smaller or `max_num_seqs` is larger. If
`max_num_seqs` is larger, the largest graph has `max_num_seqs` rows. More rows gain little. By an estimate for an H200
and an 8-billion-parameter Llama, not measured, computing 512 rows takes as long as Python needs to launch the kernels.
"""
_MAX_READ_AGAIN = 1 << 28
"""Maximum bytes of a layer's keys and values that the rows of a step may read repeatedly in a graph. A step that would
read more bytes repeatedly is computed without a graph. With 4 KiB for each token (Llama of 8 billion parameters), a
prompt of 360 tokens reaches this limit.

In a graph, each row reads the keys and values of its whole context. Without a graph, the attention kernel reads a
sequence's context once for several rows. On an H200, the kernels of one layer take 0.24 ms longer without a graph. In
0.24 ms an H200 reads 1 GB of its memory. The limit is a quarter of 1 GB, because other GPUs have less bandwidth. The
limit is an estimate, not measured; hardware caches avoid some of the repeated reads.
"""

_FEWEST_SHARING = 8
"""Minimum number of rows of a step that shares parts of prefixes. This minimum is an estimate, not measured."""
_MAX_SHARED_BYTES = 1 << 27
"""Maximum bytes of attention's float32 results for shared parts of prefixes, summed over all rows of a step. The limit
allows 32 parts of 512 tokens for 256 rows of 32 heads with 128 numbers each. Each row attends separately to the tokens
after its shared parts.
"""
_MIN_SAVED = 200 << 20
"""Minimum bytes of a layer's keys and values that sharing must save. If sharing parts of prefixes saves less reading, a
step does not share them. On an H100, attention to shared parts takes 35 µs or more, because one Triton program reads
all 512 keys of a part. When sharing saved 126 MB, attention of a layer took 38 µs instead of 28 µs. When sharing saved
235 MB, attention of a layer took 44 µs instead of 49 µs.
"""

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]
"""A function that records a computation, and returns a function and a tensor. The returned function repeats the
computation in the same memory. The returned tensor is the result of the computation, which each repetition overwrites.
"""


class DecodeGraphs:
    """The CUDA graphs of one model with one KV cache. The address of the KV cache must not change."""

    @torch.inference_mode()
    def __init__(
        self,
        model: CausalModel,
        cache: Tensor,
        max_num_rows: int,
        max_model_len: int,
        *,
        has_adapters: bool = False,
        record: Record | None = None,
    ) -> None:
        """Capture all CUDA graphs.

        cache: shape [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]. max_num_rows: rows of the largest
        graph, at least one for each sequence of a step. has_adapters: whether the model has slots for adapters. record:
        a function that is used in place of capturing CUDA graphs, for tests.
        """
        self._inputs = DecodeInputs(max_num_rows, max_model_len, cache.shape[3], cache.device)
        # Bytes of a token's keys and values in one layer of all ranks together. Every rank must choose the same graph
        # for a step. An all-reduce needs the same number of rows in all ranks, padding included.
        token_bytes = 2 * model.config.num_kv_heads * model.config.head_dim * cache.itemsize
        self._most_read_again = _MAX_READ_AGAIN // token_bytes
        self._shared = _shared_inputs(model, cache, max_num_rows, max_model_len)
        self._graphs: dict[tuple[int, bool, bool], tuple[Callable[[], object], Tensor]] = {}
        record = record or _CudaGraphs(cache.device)
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
        """Whether computing a step with a graph is faster than launching the step's kernels one by one.

        The result is true for every step with one token for each sequence.
        """
        num_rows = sum(chunk.stop - chunk.start for chunk in chunks)
        if num_rows == len(chunks):
            return True
        if num_rows > self._inputs.sizes[-1]:
            return False
        # The tokens that are read repeatedly are the contexts of all rows, except the last row of each sequence.
        read_again = sum((chunk.stop - chunk.start - 1) * (chunk.start + chunk.stop) // 2 for chunk in chunks)
        size = self._inputs.size_of(num_rows)
        if read_again > self._most_read_again and (shared := self._shared_at(size)) is not None:
            found = shared.find(*_contexts(chunks), size)
            read_again -= 0 if found is None else found.num_saved
        return read_again <= self._most_read_again

    def forward(
        self, chunks: Sequence[ScheduledChunk], unseen: UnseenTokens | None, adapter_slots: Tensor | None
    ) -> Tensor:
        """Compute a step with a graph. Returns the hidden states of the chunks' tokens, [tokens, hidden_size], which
        the next call overwrites. `fit` must be true for the chunks.

        unseen, adapter_slots: see `DecodeInputs.fill`.
        """
        size = self._inputs.fill(chunks, unseen, adapter_slots)
        shared = self._shared_at(size)
        shares = shared is not None and shared.fill(*_contexts(chunks), size)
        replay, hidden = self._graphs[size, adapter_slots is not None, shares]
        replay()
        return hidden[: sum(chunk.stop - chunk.start for chunk in chunks)]

    def _shared_at(self, size: int) -> SharedInputs | None:
        """The buffers for shared parts of prefixes, or None if steps that are padded to `size` rows do not share
        blocks.
        """
        if self._shared is None or size < _FEWEST_SHARING or not self._shared.most_parts(size):
            return None
        return self._shared

    def _forward(self, model: CausalModel, cache: Tensor, size: int, adapts: bool, shares: bool) -> Tensor:
        shared = self._shared.tensors(size) if shares and self._shared is not None else None
        inputs = self._inputs.tensors(size, shared)
        return model.forward(*inputs, cache, self._inputs.adapter_slots(size) if adapts else None)


def _contexts(chunks: Sequence[ScheduledChunk]) -> "tuple[list[array[int]], list[int]]":
    """The block table of each row, and the number of tokens to which each row attends."""
    tables = [chunk.sequence.block_ids for chunk in chunks for _ in range(chunk.start, chunk.stop)]
    return tables, [stop for chunk in chunks for stop in range(chunk.start + 1, chunk.stop + 1)]


def _shared_inputs(model: CausalModel, cache: Tensor, max_num_rows: int, max_model_len: int) -> SharedInputs | None:
    """Allocate the buffers for shared parts of prefixes, or return None if kernels do not support shared parts."""
    config = model.config
    if not isinstance(config, DecoderConfig) or is_narrow(cache.dtype):  # no 8-bit kernel can share parts
        return None
    # Heads are counted for the whole model, not for this rank. If several ranks store copies of one key head, each of
    # these ranks has fewer query heads for it. A kernel of such a rank could compute more rows together, but every rank
    # must make the same choice.
    groups = config.num_heads // config.num_kv_heads
    most_rows = ops_for(cache.device).shared_tokens(groups, config.head_dim, cache.dtype)
    row_bytes = config.num_heads * config.head_dim * torch.float32.itemsize
    most_parts, room = (max_model_len - 1) // PART_KEYS, _MAX_SHARED_BYTES // row_bytes
    if not most_rows or not most_parts:
        return None
    # Bytes of a token's keys and values in one layer of all ranks together, so that every rank makes the same choice.
    token_bytes = 2 * config.num_kv_heads * config.head_dim * cache.itemsize
    least_saved = _MIN_SAVED // token_bytes
    return SharedInputs(max_num_rows, most_rows, most_parts, room, least_saved, cache.shape[3], cache.device)


class _CudaGraphs:
    """Captures CUDA graphs that use the same memory, which is safe because only one graph runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.CUDAGraph | None = None

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        # Before the capture, the computation runs once to compile kernels, choose kernels and allocate memory. A
        # capture does not allow these operations.
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
    """Capture the CUDA graphs of a model, or return None if model, device or settings do not allow graphs."""
    blocks = cache.device_blocks
    captures = isinstance(config, DecoderConfig) and blocks.is_cuda and backend_name(blocks.device) != EAGER
    if not captures or settings.enforce_eager:
        return None
    max_num_rows = max(settings.max_num_seqs, min(_PROMPT_ROWS, settings.max_num_batched_tokens))
    return DecodeGraphs(model, blocks, max_num_rows, max_model_len, has_adapters=has_adapters)
