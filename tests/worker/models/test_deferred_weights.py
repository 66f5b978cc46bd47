"""Weights of layers have memory as floating point one layer at a time, and make the same network."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from native_networks import NATIVE
from stepped_worker import PROMPT, SteppedWorker
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from worker_helpers import LIMITS, new_sequence

from kernels import composed, reference
from worker_service.execution.cache.cache_engine import CacheEngine, CacheShape
from worker_service.execution.startup.network import Network
from worker_service.execution.steps.model_runner import ModelRunner
from worker_service.loading.checkpoint import Checkpoint
from worker_service.models.causal_model import CausalModel, Fill
from worker_service.models.decoders import decoder
from worker_service.models.layers.linear import Linear, Quantization, can_pack
from worker_service.models.registry import build_model, read_config
from worker_service.parallel.ranks import ALONE
from worker_service.settings import WorkerSettings

CPU = torch.device("cpu")
SCHEMES: tuple[Quantization, ...] = ("none", "fp8", "int8", "w8a8", "int4")
FAMILIES = [{}, {"model_type": "mixtral"}, {"model_type": "qwen2"}, NATIVE["deepseek_v3, groups"]]


def load(path: Path, scheme: Quantization, fill: Fill | None = None) -> CausalModel:
    """In bfloat16."""
    checkpoint = Checkpoint(path)
    model = build_model(read_config(checkpoint.config), torch.bfloat16, CPU, fill=fill)
    checkpoint.load_into({name: place for name, place in model.checkpoint_tensors().items() if not place.is_meta})
    model.pack(scheme)
    return model


def said_by(model: CausalModel) -> list[int]:
    config = model.config
    sizes = config.num_layers, LIMITS.block_size, config.num_kv_heads, config.head_dim
    shape = CacheShape(*sizes, torch.bfloat16, kv_parts=config.kv_parts)
    worker = SteppedWorker(ModelRunner(model, CacheEngine(shape, LIMITS.num_device_blocks, 0, CPU)))
    first = worker.step((1, len(PROMPT), True), new_sequences=(new_sequence(1, PROMPT, range(16)),))
    return [*first.token_ids, *worker.generate(1, 8)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES, ids=["llama", "mixtral", "qwen2", "deepseek_v3"])
def test_what_is_filled_when_it_is_packed_is_the_same_network(
    family: Mapping[str, object],
    scheme: Quantization,
    make_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not can_pack(CPU, torch.bfloat16, scheme):
        pytest.skip(f"this processor's kernels have no {scheme}")
    path = make_checkpoint(**family)
    filled: list[set[str]] = []
    in_floats: list[StorageWeakRef] = []

    def fill(empty: Mapping[str, Tensor]) -> None:
        assert scheme == "none" or all(memory.expired() for memory in in_floats), "that of the layer before is in use"
        filled.append(set(empty))
        in_floats.extend(StorageWeakRef(place.untyped_storage()) for place in empty.values())
        Checkpoint(path).load_into(empty)

    def pack(linear: Linear, *args: Quantization) -> None:
        memory = StorageWeakRef(linear.weight.untyped_storage())
        packed(linear, *args)
        if linear.weight.numel() == 0 and filled:  # the head comes first, whose weight the embedding has too
            assert memory.expired(), "it is packed, and still there"

    packed = Linear.pack
    with monkeypatch.context() as patched:
        patched.setattr(Linear, "pack", pack)
        deferred = load(path, scheme, fill)
    assert said_by(deferred) == said_by(load(path, scheme))
    num_layers = deferred.config.num_layers
    assert [{name.split(".")[2] for name in names} for names in filled] == [{str(n)} for n in range(num_layers)]
    ends = "proj.weight", "proj_with_mqa.weight"
    assert all(name.endswith(ends) or ".experts." in name for names in filled for name in names)


@pytest.mark.parametrize("scheme", ["none", "fp8"])
def test_experts_are_filled_a_layer_at_a_time_in_a_stack_where_kernels_multiply_all_at_once(
    scheme: Quantization, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(model_type="mixtral")
    monkeypatch.setattr(decoder, "ops_for", lambda *_: reference)
    expected = said_by(load(path, scheme))
    stacking = SimpleNamespace(**vars(reference) | {"GROUPED_PRODUCTS": True})
    stacking.pack_float8 = partial(composed.pack_float8, stacking)
    monkeypatch.setattr(decoder, "ops_for", lambda *_: stacking)
    multiplied: list[str] = []
    for name in ("grouped_linear", "grouped_float8"):
        product = getattr(reference, name)
        setattr(stacking, name, lambda *args, n=name, f=product: multiplied.append(n) or f(*args))
    assert said_by(load(path, scheme, lambda empty: Checkpoint(path).load_into(empty))) == expected
    assert said_by(load(path, scheme)) == expected
    assert set(multiplied) == {"grouped_linear" if scheme == "none" else "grouped_float8"}


def test_room_is_asked_for_as_weights_are_packed_and_one_layer_as_it_is_stored(
    make_checkpoint: Callable[..., Path],
) -> None:
    if not can_pack(CPU, torch.bfloat16, "w8a8"):
        pytest.skip("these kernels have no int4 and w8a8")
    path = make_checkpoint(num_hidden_layers=8)

    def sizes(scheme: Quantization) -> list[int]:
        settings = WorkerSettings(model=str(path), device="cpu", dtype="bfloat16", quantization=scheme)
        return Network.open(str(path), settings, CPU, ALONE).check()

    blueprint = build_model(read_config(Checkpoint(path).config), torch.bfloat16, torch.device("meta"))
    tensors = blueprint.checkpoint_tensors()
    layer = sum(place.nbytes for name, place in tensors.items() if name.startswith("model.layers.0."))
    matrices = sum(place.nbytes for name, place in tensors.items() if ".layers." in name and place.dim() == 2)
    assert sum(sizes("none")) == sum(place.nbytes for place in tensors.values())
    for scheme, share in (("int4", 3 / 8), ("w8a8", 5 / 8)):
        packed = sum(sizes("none")) - matrices * (1 - share)
        assert sum(sizes(scheme)) == pytest.approx(packed + layer, abs=100)
        assert max(sizes(scheme)) == max(sizes("none")), "which may be in memory twice"
