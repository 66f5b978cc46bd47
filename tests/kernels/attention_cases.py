"""Steps of paged attention over a cache whose unused slots are poisoned, and the check of the results."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton_helpers import DEVICE, randn, strict

from kernels import reference, triton
from kernels.inputs import AttentionMetadata

ops = strict(triton)
NAN = float("nan")


@dataclass
class Case:
    """A step over one layer of a cache in which only the sequences' own slots are not NaN."""

    query: Tensor
    layer_cache: Tensor
    metadata: AttentionMetadata
    scale: float
    tolerance: float
    attend: Callable[..., Tensor]

    def run(
        self,
        window: int | None = None,
        soft_cap: float | None = None,
        bias: Tensor | None = None,
        causal: bool = True,
        sinks: Tensor | None = None,
        chunked: bool = False,
    ) -> Tensor:
        options = (window, soft_cap, bias, causal, sinks, chunked)
        return self.attend(self.query, self.layer_cache, self.metadata, self.scale, *options)

    def check(
        self,
        window: int | None = None,
        soft_cap: float | None = None,
        bias: Tensor | None = None,
        causal: bool = True,
        sinks: Tensor | None = None,
        chunked: bool = False,
    ) -> None:
        found = self.run(window, soft_cap, bias, causal, sinks, chunked)
        assert found.shape == self.query.shape
        assert found.dtype is self.query.dtype
        assert found.is_contiguous()
        cpu = torch.device("cpu")
        metadata = replace(
            self.metadata,
            query_start=self.metadata.query_start.to(cpu),
            context_lens=self.metadata.context_lens.to(cpu),
            block_tables=self.metadata.block_tables.to(cpu),
            visible_ends=None if self.metadata.visible_ends is None else self.metadata.visible_ends.to(cpu),
        )
        query, layer_cache = self.query.to(cpu, torch.float32), self.layer_cache.to(cpu, torch.float32)
        bias, sinks = (None if option is None else option.to(cpu) for option in (bias, sinks))
        options = (window, soft_cap, bias, causal, sinks, chunked)
        expected = reference.paged_attention(query, layer_cache, metadata, self.scale, *options)
        torch.testing.assert_close(found.to(cpu, torch.float32), expected, atol=self.tolerance, rtol=self.tolerance)


def make_case(
    lens: list[tuple[int, int]],
    block_size: int = 16,
    kv_heads: int = 2,
    groups: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    attend: Callable[..., Tensor] = ops.paged_attention,
) -> Case:
    """`lens`: query tokens, and tokens computed before, of each sequence. `attend`: the kernel."""
    query_lens = [query_len for query_len, _ in lens]
    context_lens = [sum(pair) for pair in lens]
    num_blocks = [-(-context_len // block_size) for context_len in context_lens]
    pool = torch.full((sum(num_blocks) + 2, 3, 2, block_size, kv_heads, head_dim), NAN, dtype=dtype, device=DEVICE)
    shuffled = torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(1)) + 1
    block_tables = torch.full((len(lens), max(num_blocks, default=0) + 2), len(pool) + 99)
    for row, (context_len, owned) in enumerate(zip(context_lens, shuffled.split(num_blocks), strict=True)):
        block_tables[row, : len(owned)] = owned
        positions = torch.arange(context_len)
        slots = (owned[positions // block_size] * block_size + positions % block_size).to(DEVICE)
        keys, values = (randn(context_len, kv_heads, head_dim, dtype=dtype, seed=2 * row + part) for part in (0, 1))
        reference.store_kv(keys, values, pool[:, 1], slots)
    # Queries lie in a fused projection, so their rows are strided.
    width = kv_heads * groups * head_dim
    query = randn(sum(query_lens), width + 7, dtype=dtype, seed=99)[:, :width].unflatten(1, (-1, head_dim))
    metadata = AttentionMetadata.build(query_lens, context_lens, block_tables, DEVICE)
    tolerance = 2e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
    return Case(query, pool[:, 1], metadata, head_dim**-0.5, tolerance, attend)


EDGES = [(1, 0), (1, 14), (1, 15), (1, 16), (1, 62), (1, 63), (1, 64), (1, 200)]
CHUNKS = [(1, 0), (2, 0), (17, 0), (16, 16), (70, 3), (5, 100), (3, 62)]
