from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from kernels.float8 import Float8Weight, quantize_float8
from kernels.linear.quantization import quantize_int4
from pagewire_common.start_error import StartError
from worker_service.execution.startup.network import Network
from worker_service.execution.worker import load_worker
from worker_service.models.layers.linear import Linear, Quantization, can_pack, head_quantization
from worker_service.parallel.ranks import ALONE
from worker_service.settings import WorkerSettings

QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "w8a8", "int4")
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_packed_weights_give_the_same_product(rows: int, biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(48, 40, dtype=dtype)
    bias = torch.randn(48, dtype=dtype) if biased else None
    x = torch.randn(rows, 40, dtype=dtype)
    linear = Linear(weight.clone(), bias)
    linear.pack()
    torch.testing.assert_close(linear(x), functional.linear(x, weight, bias))


def test_one_embedding_serves_as_input_and_packed_output() -> None:
    embedding = torch.randn(16, 8, dtype=torch.bfloat16)
    before = embedding.clone()
    Linear(embedding).pack()
    assert torch.equal(embedding, before)


def quantized(model: Path, scheme: Quantization, **settings: Any) -> WorkerSettings:
    return WorkerSettings(model=str(model), device="cpu", quantization=scheme, num_gpu_blocks_override=40, **settings)


@pytest.mark.parametrize("scheme", QUANTIZATIONS)
def test_few_bits_for_networks_or_types_that_have_none_are_refused_before_weights_are_loaded(
    scheme: Quantization, make_checkpoint: Callable[..., Path]
) -> None:
    with pytest.raises(StartError, match=f"--quantization {scheme} is for the families that run natively"):
        load_worker(quantized(make_checkpoint(model_type="starcoder2"), scheme))
    with pytest.raises(StartError, match=f"--quantization {scheme} needs bfloat16"):
        load_worker(quantized(make_checkpoint(), scheme, dtype="float32"))


@pytest.mark.parametrize(
    ("scheme", "reason"), [("int4", "a weight is not finite, or too large for int4"), ("fp8", "a weight is not finite")]
)
def test_weights_that_few_bits_have_no_scale_for_end_the_start_in_a_sentence(
    scheme: Quantization, reason: str, make_checkpoint: Callable[..., Path]
) -> None:
    if not can_pack(CPU, torch.bfloat16, scheme):
        pytest.skip("the CPU's kernels are not compiled")
    model = make_checkpoint()
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = torch.inf
    save_file(tensors, file)
    with pytest.raises(StartError, match=f"--quantization {scheme}: {reason}"):
        load_worker(quantized(model, scheme, dtype="bfloat16"))


@pytest.mark.parametrize("scheme", QUANTIZATIONS)
def test_weights_rounded_in_another_way_have_another_fingerprint(
    scheme: Quantization, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_pack(torch.device("cpu"), torch.bfloat16, scheme):
        pytest.skip(f"this machine has no products of {scheme} weights")
    settings = quantized(make_checkpoint(), scheme, dtype="bfloat16")
    fingerprint = load_worker(settings).info.model_fingerprint
    assert load_worker(settings).info.model_fingerprint == fingerprint
    for name in ("WEIGHT_GROUP", "W8A8_GROUP"):
        monkeypatch.setattr(f"worker_service.execution.startup.network.{name}", 256)
    assert load_worker(settings).info.model_fingerprint != fingerprint


@pytest.mark.parametrize("biased", [False, True])
def test_parts_of_a_weight_may_be_quantised_in_ways_of_their_own(biased: bool) -> None:
    """And one of them not at all."""
    if not can_pack(torch.device("cpu"), torch.bfloat16, "gguf"):
        pytest.skip("the CPU's kernels are not compiled")
    torch.manual_seed(0)
    weight, x = torch.randn(40, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    bias = torch.randn(40).bfloat16() if biased else None
    coarse, fine = quantize_int4(weight[:10]), quantize_int4(weight[10:30])._replace(bits=8)
    linear = Linear(weight.clone(), bias)
    linear.pack_parts([coarse, fine, None], [10, 20, 10])
    torch.testing.assert_close(
        linear(x), functional.linear(x, weight, bias), atol=3, rtol=0
    )  # of 64 weights with 4 bits
    assert torch.equal(linear(x)[:, 30:], functional.linear(x, weight, bias)[:, 30:])
    alike = Linear(weight.clone(), bias)
    alike.pack_parts([coarse, quantize_int4(weight[10:])], [10, 30])
    assert torch.equal(alike(x)[:, :30], linear(x)[:, :30])  # 8 bits with the same numbers
    with pytest.raises(ValueError, match=r"a weight is \[10, 64\] where \[20, 64\] is needed"):
        Linear(weight, bias).pack_parts([coarse, coarse], [20, 20])


@pytest.mark.parametrize("biased", [False, True])
def test_parts_in_fp8_keep_the_scales_of_their_inputs(biased: bool) -> None:
    """Those that round inputs alike are one product; others are multiplied one by one."""
    torch.manual_seed(0)
    weight, x = torch.randn(48, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    bias = torch.randn(48).bfloat16() if biased else None
    own, stored = quantize_float8(weight[:16]), quantize_float8(weight[16:])._replace(input_scale=torch.tensor(0.01))

    def product(parts: list[Float8Weight], sizes: list[int]) -> torch.Tensor:
        linear = Linear(weight.clone(), bias)
        linear.pack_parts(parts, sizes)
        return linear(x)

    whole = product([own, stored._replace(input_scale=None)], [16, 32])
    assert torch.equal(whole, product([quantize_float8(weight)], [48]))
    mixed = product([own, stored], [16, 32])
    assert torch.equal(mixed[:, :16], whole[:, :16])
    assert not torch.equal(mixed[:, 16:], whole[:, 16:])
    torch.testing.assert_close(mixed, functional.linear(x, weight, bias), atol=1.5, rtol=0)


def test_fp8_takes_every_type_and_leaves_embeddings_and_head_as_they_are(make_checkpoint: Callable[..., Path]) -> None:
    assert all(can_pack(CPU, dtype, "fp8") for dtype in (torch.float32, torch.float16, torch.bfloat16))
    assert all(head_quantization(CPU, dtype, "fp8") == "none" for dtype in (torch.float32, torch.bfloat16))
    settings = quantized(make_checkpoint(), "fp8", dtype="bfloat16")
    fingerprint = load_worker(settings).info.model_fingerprint
    assert fingerprint != load_worker(settings.model_copy(update={"quantization": "none"})).info.model_fingerprint


def test_what_depends_on_whole_rows_is_refused_where_rows_are_cut_and_where_kernels_lack_it(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def network(path: Path, ranks: Any = ALONE, scheme: Quantization = "fp8") -> Network:
        return Network.open(str(path), quantized(path, scheme), CPU, ranks)

    with pytest.raises(StartError, match="--quantization fp8 is for the families that run natively"):
        network(make_checkpoint(model_type="starcoder2")).check()
    network(make_checkpoint()).check()
    schemes: tuple[Quantization, ...] = ("fp8", "w8a8") if can_pack(CPU, torch.bfloat16, "w8a8") else ("fp8",)
    for scheme in schemes:
        with pytest.raises(StartError, match=f"--quantization {scheme} is for workers of one process"):
            network(make_checkpoint(), SimpleNamespace(size=2, rank=0), scheme).check()
    mixture = network(make_checkpoint(model_type="mixtral"))
    mixture.check()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(StartError, match=r"--quantization fp8 of experts is for CPUs and GPUs of compute cap.* 8\.9"):
        replace(mixture, device=torch.device("cuda")).check()


def test_adapters_add_to_products_in_fp8_what_they_add_to_others() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(48, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    slots = torch.tensor([0, -1, 1, 0, -1], dtype=torch.int32)
    added = []
    for scheme in ("none", "fp8"):
        linear = Linear(weight.clone())
        lora = linear.allocate_adapters([48], 2, 4)
        torch.manual_seed(1)
        for part in (lora.a, lora.b):
            part.normal_(std=3)
        lora.ranks.fill_(4)
        linear.pack(scheme)
        added.append((linear(x, slots) - linear(x)).float())
    assert (added[0][[1, 4]] == 0).all()
    torch.testing.assert_close(added[0], added[1], rtol=0.02, atol=1)


def test_experts_in_a_stack_are_stored_alike_or_widened(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels multiply those of a layer at once: all of them in fp8, or none."""
    path = make_checkpoint(model_type="mixtral")
    network = Network.open(str(path), WorkerSettings(model=str(path), device="cpu"), CPU, ALONE)
    names = [name for name in network.checkpoint._weights.dtypes if ".experts." in name]  # type: ignore[attr-defined]
    for packs in (names, [name for name in names if "layers.1." in name], []):
        assert network._has_whole_stacks(dict.fromkeys(packs))  # type: ignore[arg-type]
    for packs in (names[1:], [name for name in names if ".w2." in name]):
        assert not network._has_whole_stacks(dict.fromkeys(packs))  # type: ignore[arg-type]
