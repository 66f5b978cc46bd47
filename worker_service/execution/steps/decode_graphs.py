"""Steps as CUDA graphs: a forward pass of hundreds of kernels is one launch.

On an H200 a decode step of an 8-billion-parameter Llama takes 4.5 ms as a graph. If Python launches each kernel, the
step takes 12.2 ms. A graph is captured for each of a few batch sizes, in rows. Every token has a row. The same graphs
therefore also compute steps that verify drafts and steps with short prompts or the end of a prompt. The largest graph
is captured first, so that the other graphs reuse its memory. Logits and sampling are not part of the graphs, because
their rows change from step to step.

Adapters add two kernels to each product, which are 256 kernels in a pass of 32 layers. If a worker has slots for
adapters, each size therefore has a graph with adapter kernels and a graph without them. A step of the base model
launches no adapter kernels. The two graphs share inputs and memory. The second graph costs the time of its capture and
the driver's memory for its launches. Launches do not depend on the adapters, because kernels read slots and ranks on
the device.

If kernels support shared prefixes (`worker_service.execution.cache.shared_prefixes`), graph sizes of 8 rows and more
have two graphs. The first graph has one more launch a layer, and computes steps whose rows share enough blocks. The
second graph computes all other steps. If a cached long prompt is followed by a short question, the question's rows
share the prompt's blocks too. Steps without a graph do not share blocks, because launches without a graph cost more
time than sharing could save.
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
"""Minimum rows of the largest graph, if a step may have so many tokens. With a larger `max_num_seqs`, the largest graph
has `max_num_seqs` rows. Estimate for an H200 and an 8-billion-parameter Llama, not measured: 512 rows compute for as
long as Python needs to launch the kernels.
"""
_MAX_READ_AGAIN = 1 << 28
"""Bytes of a layer's keys and values that the rows of a step may read repeatedly. At 4 KiB a token (Llama of 8 billion
parameters) a prompt of 360 tokens reaches this limit.

In a graph each row of a sequence reads the whole context. An eager pass reads the context once for several rows. On an
H200 the kernels of a layer take 0.24 ms longer without a graph. In 0.24 ms the memory of an H200 reads 1 GB. The limit
is a quarter of 1 GB, because other GPUs have less bandwidth. The limit is an estimate, not measured. Hardware caches
avoid some of the reads.
"""

_FEWEST_SHARING = 8
"""Smallest number of rows of a step with shared parts. Not measured."""
_MAX_SHARED_BYTES = 1 << 27
"""Maximum bytes of the float32 results of shared parts over all rows of a step. The limit allows 32 parts of 512 tokens
for 256 rows of 32 heads of 128. Each row attends separately to the tokens after its shared parts.
"""
_MIN_SAVED = 200 << 20
"""Smallest number of bytes of a layer's keys and values that sharing must save. On an H100 sharing takes 35 µs or more,
because one program reads the 512 keys of a part. When sharing saved 126 MB, a layer took 38 µs instead of 28 µs. When
sharing saved 235 MB, a layer took 44 µs instead of 49 µs.
"""

Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]
"""Function that records a computation. The returned function repeats the computation in the same memory. The returned
tensor is the result. Each repetition overwrites the result.
"""


class DecodeGraphs:
    """The graphs of one model for one cache. The address of the cache must not change."""

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
        """Capture the graphs.

        cache: shape [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]. max_num_rows: rows of the largest
        graph, at least one for each sequence of a step. has_adapters: whether the model has slots for adapters. record:
        replaces the capture of CUDA graphs.
        """
        self._inputs = DecodeInputs(max_num_rows, max_model_len, cache.shape[3], cache.device)
        # The heads of all ranks are counted, because all ranks must make the same decision. An all-reduce needs equal
        # numbers of rows in all ranks, padding included.
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
                # A capture computes padding rows only.
                self._graphs[kind] = record(partial(self._forward, model, cache, *kind))
                progress.update()

    def fit(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Whether computing a step with a graph is faster than launching each of the step's kernels.

        A graph fits every step with one token for each sequence.
        """
        num_rows = sum(chunk.stop - chunk.start for chunk in chunks)
        if num_rows == len(chunks):
            return True
        if num_rows > self._inputs.sizes[-1]:
            return False
        # Only repeated reads are counted: the contexts of all rows except the last row of each sequence.
        read_again = sum((chunk.stop - chunk.start - 1) * (chunk.start + chunk.stop) // 2 for chunk in chunks)
        size = self._inputs.size_of(num_rows)
        if read_again > self._most_read_again and (shared := self._shared_at(size)) is not None:
            found = shared.find(*_contexts(chunks), size)
            read_again -= 0 if found is None else found.num_saved
        return read_again <= self._most_read_again

    def forward(
        self, chunks: Sequence[ScheduledChunk], unseen: UnseenTokens | None, adapter_slots: Tensor | None
    ) -> Tensor:
        """Return the hidden states of the chunks' tokens, [tokens, hidden_size]. The chunks must `fit`. The next call
        overwrites the hidden states.

        unseen, adapter_slots: see `DecodeInputs.fill`.
        """
        size = self._inputs.fill(chunks, unseen, adapter_slots)
        shared = self._shared_at(size)
        shares = shared is not None and shared.fill(*_contexts(chunks), size)
        replay, hidden = self._graphs[size, adapter_slots is not None, shares]
        replay()
        return hidden[: sum(chunk.stop - chunk.start for chunk in chunks)]

    def _shared_at(self, size: int) -> SharedInputs | None:
        """The buffers for shared parts, or None if steps of this many rows do not share blocks."""
        if self._shared is None or size < _FEWEST_SHARING or not self._shared.most_parts(size):
            return None
        return self._shared

    def _forward(self, model: CausalModel, cache: Tensor, size: int, adapts: bool, shares: bool) -> Tensor:
        shared = self._shared.tensors(size) if shares and self._shared is not None else None
        inputs = self._inputs.tensors(size, shared)
        return model.forward(*inputs, cache, self._inputs.adapter_slots(size) if adapts else None)


def _contexts(chunks: Sequence[ScheduledChunk]) -> "tuple[list[array[int]], list[int]]":
    """The blocks of each row, and the number of tokens that the row sees."""
    tables = [chunk.sequence.block_ids for chunk in chunks for _ in range(chunk.start, chunk.stop)]
    return tables, [stop for chunk in chunks for stop in range(chunk.start + 1, chunk.stop + 1)]


def _shared_inputs(model: CausalModel, cache: Tensor, max_num_rows: int, max_model_len: int) -> SharedInputs | None:
    """The buffers for shared parts, or None if kernels do not support shared parts."""
    config = model.config
    if not isinstance(config, DecoderConfig) or is_narrow(cache.dtype):  # no kernel shares parts of 8-bit caches
        return None
    # Ranks may store copies of the same key head. Each of these ranks has fewer query heads for the key head, and a
    # kernel could then compute more rows together.
    groups = config.num_heads // config.num_kv_heads
    most_rows = ops_for(cache.device).shared_tokens(groups, config.head_dim, cache.dtype)
    row_bytes = config.num_heads * config.head_dim * torch.float32.itemsize
    most_parts, room = (max_model_len - 1) // PART_KEYS, _MAX_SHARED_BYTES // row_bytes
    if not most_rows or not most_parts:
        return None
    # The heads of all ranks are counted, because all ranks must make the same decision.
    token_bytes = 2 * config.num_kv_heads * config.head_dim * cache.itemsize
    least_saved = _MIN_SAVED // token_bytes
    return SharedInputs(max_num_rows, most_rows, most_parts, room, least_saved, cache.shape[3], cache.device)


class _CudaGraphs:
    """Captures graphs that share memory. Sharing is safe because only one graph runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.CUDAGraph | None = None

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        # The first call compiles and chooses kernels, and allocates memory, outside of the capture.
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
    """The captured graphs of a model's steps, or None if the model, device or settings do not allow graphs."""
    blocks = cache.device_blocks
    captures = isinstance(config, DecoderConfig) and blocks.is_cuda and backend_name(blocks.device) != EAGER
    if not captures or settings.enforce_eager:
        return None
    max_num_rows = max(settings.max_num_seqs, min(_PROMPT_ROWS, settings.max_num_batched_tokens))
    return DecodeGraphs(model, blocks, max_num_rows, max_model_len, has_adapters=has_adapters)
