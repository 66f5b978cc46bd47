"""A mixture of experts: what a token gets of it is its formula, whatever tokens are beside it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels import reference
from kernels.float8 import Float8Weight, quantize_float8
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.decoders.families import read_decoder
from worker_service.models.decoders.mlp import MixtureMlp
from worker_service.models.layers import expert_linear
from worker_service.models.layers.expert_linear import ExpertLinear
from worker_service.models.layers.linear import Linear, Quantization, can_pack

CPU = torch.device("cpu")
BIASED = {"model_type": "gpt_oss", "num_key_value_heads": 4, "moe_intermediate_size": None, "norm_topk_prob": None}


def config(**changes: Any) -> DecoderConfig:
    return read_decoder(
        {
            "model_type": "qwen3_moe",
            "vocab_size": 131,
            "hidden_size": 64,
            "intermediate_size": 100,
            "moe_intermediate_size": 96,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
        }
        | changes
    )


def mixture(dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[MixtureMlp, dict[str, Tensor]]:
    """With random weights, and these by their names in a checkpoint; it is not packed yet."""
    network = config(**changes)
    assert network.mixture is not None
    mlp = MixtureMlp(network, network.mixture, network.mixture.intermediate_size, dtype, CPU)
    generator, weights = torch.Generator().manual_seed(0), {}
    for linear, names in mlp.projections:
        for name, place in linear.parts(names).items():
            weights[name] = place.normal_(std=0.2, generator=generator).clone()
    return mlp, weights


def pack(mlp: MixtureMlp, quantization: Quantization = "none") -> MixtureMlp:
    for linear, _ in mlp.projections:
        linear.pack(quantization)
    return mlp


def inputs(dtype: torch.dtype = torch.float32, rows: int = 50) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


def formula(weights: dict[str, Tensor], x: Tensor, num_chosen: int) -> Tensor:
    """One token after the other, in float64."""
    wide = {name.removeprefix("mlp.").removesuffix(".weight"): weight.double() for name, weight in weights.items()}
    results = []
    for row in x.double():
        shares, chosen = (wide["gate"] @ row).softmax(0).topk(num_chosen)
        result = torch.zeros_like(row)
        for share, expert in zip(shares / shares.sum(), chosen.tolist(), strict=True):
            gate, up, down = (wide[f"experts.{expert}.{name}_proj"] for name in ("gate", "up", "down"))
            result += share * (down @ (functional.silu(gate @ row) * (up @ row)))
        results.append(result)
    return torch.stack(results)


@pytest.mark.parametrize("num_chosen", [1, 3, 8])
def test_a_token_gets_the_weighted_sum_of_its_experts(num_chosen: int) -> None:
    mlp, weights = mixture(num_experts_per_tok=num_chosen)
    expected = formula(weights, inputs(), num_chosen)
    for computed in (mlp(inputs(), None), pack(mlp)(inputs(), None)):
        assert computed.dtype is torch.float32
        torch.testing.assert_close(computed.double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        (torch.float32, "none"),
        (torch.float16, "none"),
        (torch.bfloat16, "none"),
        (torch.float32, "fp8"),
        (torch.bfloat16, "fp8"),
        (torch.bfloat16, "int8"),
        (torch.bfloat16, "w8a8"),
        (torch.bfloat16, "int4"),
    ],
)
def test_a_token_gets_the_same_bits_alone_and_beside_any_others(dtype: torch.dtype, quantization: Quantization) -> None:
    """Batches of 1 to 50 tokens, in which it is at any place; and 40 copies of one, which share their experts."""
    if quantization != "none" and not can_pack(CPU, dtype, quantization):
        pytest.skip(f"this machine has no products of {quantization}")
    mlp, x = pack(mixture(dtype)[0], quantization), inputs(dtype)
    together = mlp(x, None)
    for size in (1, 2, 3, 7, 16, 17, 33):
        for start in range(0, 50 - size, 5):
            assert torch.equal(mlp(x[start : start + size], None), together[start : start + size])
    order = torch.randperm(50, generator=torch.Generator().manual_seed(2))
    assert torch.equal(mlp(x[order], None), together[order])
    crowd = torch.cat([x[3:4].expand(40, -1), x[10:15]])
    assert torch.equal(mlp(crowd, None), torch.cat([together[3:4].expand(40, -1), together[10:15]]))


@pytest.mark.parametrize(("quantization", "most"), [("fp8", 0.1), ("int8", 0.02), ("w8a8", 0.05), ("int4", 0.3)])
def test_quantised_experts_are_near_and_tokens_have_the_same_ones(quantization: Quantization, most: float) -> None:
    """With another expert a token would get something else altogether."""
    if not can_pack(CPU, torch.bfloat16, quantization):
        pytest.skip(f"this machine has no products of {quantization}")
    mlp, weights = mixture(torch.bfloat16)
    x = inputs(torch.bfloat16)
    expected = formula(weights, x, 3)
    errors = (pack(mlp, quantization)(x, None) - expected).norm(dim=1) / expected.norm(dim=1)
    assert 0 < errors.max() < most


def test_a_packed_expert_is_in_memory_once() -> None:
    mlp = pack(mixture(torch.bfloat16)[0])
    assert all(linear.weight.numel() == 0 for linear, _ in mlp.projections)


@pytest.mark.parametrize("family", [{}, BIASED], ids=["without biases", "with biases"])
def test_experts_are_filled_one_by_one_in_a_stack_where_kernels_multiply_all_at_once(
    family: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, weights = mixture(**family)
    grouped = SimpleNamespace(**vars(reference) | {"GROUPED_PRODUCTS": True})
    monkeypatch.setattr(expert_linear, "ops_for", lambda _: grouped)
    stacked, same = mixture(**family)
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    gate_ups = [linear.weight for linear, _ in stacked.projections[1::2]]
    assert len({weight.untyped_storage().data_ptr() for weight in gate_ups}) == 1
    torch.testing.assert_close(pack(stacked)(inputs(), None), pack(alone)(inputs(), None))


def random_weight(inputs: int = 64, seed: int = 0, groups: int = 1) -> Float8Weight:
    """Of 24 outputs."""
    draw = torch.Generator().manual_seed(seed)
    numbers, scales, _ = quantize_float8(torch.randn(24 * groups, inputs // groups, generator=draw))
    return Float8Weight(numbers.view(24, inputs), scales.view(24, groups))


def stacked(monkeypatch: pytest.MonkeyPatch) -> ExpertLinear:
    grouped = SimpleNamespace(**vars(reference) | {"GROUPED_PRODUCTS": True})
    monkeypatch.setattr(expert_linear, "ops_for", lambda _: grouped)
    return ExpertLinear(3, 24, 64, torch.bfloat16, torch.device("cpu"))


def test_a_stack_holds_experts_that_are_stored_in_fp8_with_scales_for_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = stacked(monkeypatch)
    weights = [random_weight(seed=seed, groups=2) for seed in range(3)]
    for expert, weight in zip(linear.experts, weights, strict=True):
        # Of two projections that are one product.
        parts = [Float8Weight(weight.numbers[rows], weight.scales[rows]) for rows in (slice(8), slice(8, None))]
        expert.pack_parts(parts, [8, 16])
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = linear(x, torch.tensor([2, 2, 7]))
    torch.testing.assert_close(found[:2], reference.pack_float8(weights[0])(x[:2], None), atol=0, rtol=0)
    torch.testing.assert_close(found[2:], reference.pack_float8(weights[2])(x[2:], None), atol=0, rtol=0)


def test_what_a_stack_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = stacked(monkeypatch)
    first, second, third = linear.experts
    in_one, in_two = random_weight(), random_weight(groups=2)
    first.pack_parts([in_one], [24])
    for refuse in (lambda: second.pack_parts([in_two], [24]), third.pack):
        with pytest.raises(ValueError, match="the experts of a layer are quantised in different ways"):
            refuse()
    with pytest.raises(ValueError, match="do not support a stack of such experts"):
        second.pack_parts([in_one._replace(input_scale=torch.tensor(0.1))], [24])
    with pytest.raises(ValueError, match="do not support a stack of experts in int8"):
        second.pack("int8")
    with pytest.raises(ValueError, match=r"a weight is \[24, 32\] where \[24, 64\] is needed"):
        second.pack_parts([random_weight(32)], [24])


def test_only_experts_with_rows_are_multiplied_with(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, _ = mixture()
    router, *experts = (linear for linear, _ in mlp.projections)
    router.weight.zero_()  # so that every token has the first three
    used: list[Linear] = []
    multiply = Linear.__call__
    monkeypatch.setattr(Linear, "__call__", lambda linear, x: (used.append(linear), multiply(linear, x))[1])
    pack(mlp)(inputs(), None)
    assert {id(linear) for linear in used} == {id(linear) for linear in (router, *experts[:6])}


def test_neither_experts_nor_their_router_take_adapters() -> None:
    assert mixture()[0].adapted == []
