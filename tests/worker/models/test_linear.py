from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from kernels.backends import ops_for
from pagewire_common.start_error import StartError
from worker_service.execution.worker import load_worker
from worker_service.models.linear import Linear
from worker_service.settings import WorkerSettings


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_packed_weights_give_the_same_product(rows: int, biased: bool) -> None:
    torch.manual_seed(rows)
    weight = torch.randn(48, 40, dtype=torch.bfloat16)
    bias = torch.randn(48, dtype=torch.bfloat16) if biased else None
    x = torch.randn(rows, 40, dtype=torch.bfloat16)
    linear = Linear(weight.clone(), bias)
    linear.pack()
    torch.testing.assert_close(linear(x), functional.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_of_other_types_stay_as_they_are(dtype: torch.dtype) -> None:
    linear = Linear(torch.ones(4, 3, dtype=dtype))
    linear.pack()
    assert linear.weight.shape == (4, 3)
    assert torch.equal(linear(torch.ones(2, 3, dtype=dtype)), torch.full((2, 4), 3, dtype=dtype))


def test_one_embedding_serves_as_input_and_packed_output() -> None:
    embedding = torch.randn(16, 8, dtype=torch.bfloat16)
    before = embedding.clone()
    Linear(embedding).pack()
    assert torch.equal(embedding, before)


def test_int8_for_networks_or_types_that_have_none_is_refused_before_weights_are_loaded(
    make_checkpoint: Callable[..., Path],
) -> None:
    borrowed = make_checkpoint(model_type="starcoder2")
    with pytest.raises(StartError, match="--quantization int8 is for the families that run natively"):
        load_worker(WorkerSettings(model=str(borrowed), device="cpu", quantization="int8", num_device_blocks=8))
    native = make_checkpoint()
    with pytest.raises(StartError, match="--quantization int8 needs bfloat16"):
        load_worker(
            WorkerSettings(model=str(native), device="cpu", dtype="float32", quantization="int8", num_device_blocks=8)
        )


def test_weights_rounded_in_another_way_have_another_fingerprint(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if ops_for(torch.device("cpu")).pack_int8(torch.ones(2, 2, dtype=torch.bfloat16)) is None:
        pytest.skip("this machine has no bf16 dot products, which int8 weights need")
    settings = WorkerSettings(
        model=str(make_checkpoint()), device="cpu", dtype="bfloat16", quantization="int8", num_device_blocks=40
    )
    fingerprint = load_worker(settings).info.model_fingerprint
    assert load_worker(settings).info.model_fingerprint == fingerprint
    monkeypatch.setattr("worker_service.execution.network.INT8_GROUP", 64)
    assert load_worker(settings).info.model_fingerprint != fingerprint
