"""The small operations as Triton kernels against eager torch."""

import pytest
import torch
from triton_helpers import DEVICE, DTYPES, quiet_interpreter, randn, strict

from kernels import composed, reference, triton
from kernels.inputs import AttentionMetadata, rotary_tables
from kernels.ops import Activation, ClampedSwiglu, LoraWeights

ops = strict(triton)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (5, 123), (2, 3, 64), (40, 10), (2, 1, 3, 20), (3, 4100), (0, 8)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    for offset in (0.0, 1.0):
        found = ops.rms_norm(x, weight, 1e-5, offset)
        torch.testing.assert_close(found, reference.rms_norm(x, weight, 1e-5, offset))
        assert found.is_contiguous()
        wide = ops.rms_norm(x, weight, 1e-5, offset, torch.float32)
        torch.testing.assert_close(wide, reference.rms_norm(x, weight, 1e-5, offset, torch.float32))


def test_rms_norm_reads_rows_where_they_lie() -> None:
    fused = randn(7, 100)
    weight = randn(10, seed=1)
    for x in (
        fused[:, 3:13],
        fused[:, 40:70].view(7, 3, 10),
        fused[:, :60].view(7, 2, 3, 10),
        fused[:10].T[:, :7].T[:, :10],
        fused[:, ::10],
        fused[0, :10],
    ):
        torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (5, 123), (300, 16), (0, 8)])
def test_add_rms_norm_changes_the_residual_and_normalises_what_is_left_of_the_sum(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, weight = randn(shape[0], 2 * shape[1], dtype=dtype)[:, : shape[1]], randn(shape[1], dtype=dtype, seed=1)
    residual = randn(*shape, seed=2)
    for delta in (x, x.float()):
        expected_residual = residual.clone()
        expected = reference.add_rms_norm(delta, expected_residual, weight, 1e-5, 1.0)
        torch.testing.assert_close(ops.add_rms_norm(delta, residual, weight, 1e-5, 1.0), expected)
        assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim", "rotary_dim"), [(1, 2, 2), (3, 10, 10), (5, 80, 20), (40, 128, 128)])
def test_rotary_embedding(heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 77, 8000, 3], device=DEVICE)
    frequencies = 100.0 ** -(torch.arange(rotary_dim // 2, device=DEVICE) * 2 / rotary_dim)
    cos, sin = rotary_tables(positions, frequencies, 1.5)
    fused = randn(5, 2 * heads * head_dim, dtype=dtype)
    expected = fused.clone()
    for tokens in (5, 1, 0):
        for rotate, tensor in ((ops.rotary_embedding, fused), (reference.rotary_embedding, expected)):
            part = tensor[:tokens, heads * head_dim :].view(tokens, heads, head_dim)
            rotate(part, cos[:tokens], sin[:tokens])
        torch.testing.assert_close(fused, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "heads", "head_dim"), [(4, 3, 10), (3, 1, 5), (1, 2, 8), (16, 2, 64)])
def test_store_kv_writes_the_slots_and_nothing_else(
    block_size: int, heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    found = torch.full((7, 3, 2, block_size, heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    expected = found.clone()
    fused = randn(5, 3 * heads * head_dim, dtype=dtype)
    keys, values = (fused[:, n * heads * head_dim :][:, : heads * head_dim].view(5, heads, head_dim) for n in (1, 2))
    slots = torch.tensor([6 * block_size, 0, 6 * block_size - 1, -1, 2 * block_size], device=DEVICE)
    ops.store_kv(keys, values, found[:, 1], slots)
    kept = slots >= 0
    reference.store_kv(keys[kept], values[kept], expected[:, 1], slots[kept])
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    ops.store_kv(keys[:0], values[:0], found[:, 1], slots[:0])
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@quiet_interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [*reference.ACTIVATIONS, ClampedSwiglu(1.7, 2.5)], ids=str)
@pytest.mark.parametrize("shape", [(5, 246), (1, 2), (2, 3, 2050), (0, 8)])
def test_gated_activation(shape: tuple[int, ...], activation: Activation, dtype: torch.dtype) -> None:
    x = 3 * randn(*shape, dtype=dtype)
    if x.numel():
        x.view(-1, shape[-1])[:, 0] = torch.tensor([1000.0, -1000.0]).repeat(len(x.view(-1, shape[-1])))[
            : len(x.view(-1, shape[-1]))
        ]
    found = ops.gated_activation(x, activation)
    assert found.shape == (*shape[:-1], shape[-1] // 2)
    tolerance = {} if dtype is torch.float32 else {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-4}
    torch.testing.assert_close(found, reference.gated_activation(x, activation), **tolerance)


def test_gated_activation_of_a_slice() -> None:
    x = randn(5, 100)[:, 10:30]
    torch.testing.assert_close(ops.gated_activation(x, "silu"), reference.gated_activation(x, "silu"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_pairs", [0, 1, 3, 8, 300])
def test_copies_read_every_source_before_they_write(num_pairs: int, dtype: torch.dtype) -> None:
    found = randn(320, 3, 41, dtype=dtype)
    expected = found.clone()
    sources = torch.randint(0, 320, (num_pairs,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    destinations = torch.randperm(320, generator=torch.Generator().manual_seed(2))[:num_pairs].to(DEVICE)
    if num_pairs > 1:
        sources[1:] = destinations[:-1]  # a chain: each copy's source is the destination of the one before
    ops.copy_blocks(found, sources, destinations)
    reference.copy_blocks(expected, sources, destinations)
    assert torch.equal(found, expected)


@quiet_interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"),
    [(3, 1, 10, 10), (6, 2, 16, 12), (32, 8, 64, 64), (4, 4, 8, 0), (8, 1, 256, 256)],
)
@pytest.mark.parametrize("normalised", [False, True])
def test_qkv_attention(
    heads: int, kv_heads: int, head_dim: int, rotary_dim: int, normalised: bool, dtype: torch.dtype
) -> None:
    block_size, context_lens = 3, [9, 1, 5]
    num_tokens = 3 + 1 + 2
    qkv = randn(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    qkv[5, -1], qkv[5, -head_dim] = torch.inf, torch.nan  # in a value
    norms = (randn(head_dim, dtype=dtype, seed=1), randn(head_dim, dtype=dtype, seed=2)) if normalised else None
    positions = torch.tensor([6, 7, 8, 0, 3, 4], device=DEVICE)
    rotation = None
    if rotary_dim:
        frequencies = 100.0 ** -(torch.arange(rotary_dim // 2, device=DEVICE) * 2 / rotary_dim)
        rotation = rotary_tables(positions, frequencies, 1.5)
    tables = torch.tensor([[4, 1, 6], [0, 0, 0], [2, 5, 0]])
    metadata = AttentionMetadata.build([3, 1, 2], context_lens, tables, DEVICE)
    slots = torch.tensor([18, 19, 20, 0, -1, 16], device=DEVICE)
    cache = randn(7, 2, 2, block_size, kv_heads, head_dim, dtype=dtype, seed=3)
    found, expected = cache.clone(), cache.clone()
    arguments = (metadata, head_dim**-0.5, 4, None, randn(heads, seed=4), True)  # chunks of 4
    attended = ops.qkv_attention(qkv.clone(), norms, 1e-5, 1.0, rotation, found[:, 1], slots, *arguments)
    # Eager torch cannot leave a slot out: it stores into the place of the token before, and is mended afterwards.
    eager_slots = slots.where(slots >= 0, 15)
    kept = expected[5, 1].clone()
    again = composed.qkv_attention(
        reference, qkv.clone(), norms, 1e-5, 1.0, rotation, expected[:, 1], eager_slots, *arguments
    )
    expected[5, 1, :, 0] = kept[:, 0]
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)
    rows = [0, 1, 2, 3]  # the others see values that are not finite, or are stored in only one of the caches
    torch.testing.assert_close(attended[rows], again[rows], **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (5, 123), (64, 2048), (33, 4100)])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_products_of_packed_weights(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight = randn(rows, inputs, dtype=dtype), randn(outputs, inputs, dtype=dtype, seed=1)
    for bias in (None, randn(outputs, dtype=dtype, seed=2)):
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        found = ops.pack(weight)(x, bias)
        assert found.dtype is dtype
        tolerance = {} if rows == 1 else {"atol": 0.2 if dtype is not torch.float32 else 1e-3, "rtol": 1e-2}
        torch.testing.assert_close(found, expected.to(dtype), **(tolerance or {"atol": 1e-4, "rtol": 1e-2}))
        wide = ops.pack(weight, True)(x, bias)
        torch.testing.assert_close(wide, expected.float(), atol=2e-3, rtol=1e-4)


@quiet_interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("starts", [(0, 70), (0, 300, 601), (0, 40, 61, 100)])
def test_adapters_add_what_those_of_the_reference_add(starts: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows in any order, ranks from none to the largest; other rows stay as they are, and no row depends on them."""
    inputs, parts = 77, len(starts) - 1
    ranks = torch.tensor([3, 0, 5, 1], dtype=torch.int32, device=DEVICE)
    a, b = randn(4, parts, 5, inputs, dtype=dtype) * 0.1, randn(4, 5, starts[-1], dtype=dtype, seed=1)
    weights = LoraWeights(a, b, ranks, starts)
    slots = torch.tensor([2, -1, 0, 0, 1, 3], dtype=torch.int32, device=DEVICE)
    x = randn(6, 2 * inputs, dtype=dtype, seed=2)[:, :inputs]
    before = randn(6, starts[-1], seed=3)
    found, expected = before.clone(), before.clone()
    ops.add_lora(found, x, slots, weights)
    reference.add_lora(expected, x, slots, weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[[1, 4]], before[[1, 4]])
    for row in range(6):
        alone = before[row : row + 1].clone()
        ops.add_lora(alone, x[row : row + 1], slots[row : row + 1], weights)
        assert torch.equal(alone[0], found[row])
    ops.add_lora(found[:0], x[:0], slots[:0], weights)
