"""Vectors of tokens, whether they are read from a table or from the packed weights of the head."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.linear.quantization import quantize_int4
from kernels.ops import GroupedWeight
from worker_service.loading.checkpoint import Checkpoint
from worker_service.loading.quantized.packed_weights import widened
from worker_service.models.decoders.decoder import Decoder
from worker_service.models.layers.embedding import Embedding
from worker_service.models.layers.linear import Linear, Quantization, can_pack
from worker_service.models.registry import build_model, read_config
from worker_service.parallel.ranks import ALONE

CPU = torch.device("cpu")
IDS = torch.tensor([39, 0, 7, 7, 31, 32])


def needs_compiled_kernels() -> None:
    if not can_pack(CPU, torch.bfloat16, "gguf"):
        pytest.skip("the CPU's kernels are not compiled")


def random_table() -> Tensor:
    return torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def tied(table: Tensor, pack: Callable[[Linear], None]) -> Embedding:
    embedding, head = Embedding(table.clone(), range(40), ALONE), Linear(table.clone(), wide=True)
    pack(head)
    embedding.take_rows_of(head)
    return embedding


def test_a_packed_head_takes_the_place_of_the_table() -> None:
    needs_compiled_kernels()
    table = random_table()
    embedding = tied(table, lambda head: head.pack())
    assert embedding.weight.numel() == 0
    assert torch.equal(embedding(IDS), table[IDS].float())


@pytest.mark.parametrize("order", [None, torch.arange(63, -1, -1)], ids=["in order", "in another order"])
def test_so_does_one_whose_weights_are_quantised(order: Tensor | None) -> None:
    needs_compiled_kernels()
    weight: GroupedWeight = quantize_int4(random_table())._replace(order=order)
    embedding = tied(random_table(), lambda head: head.pack_parts([weight], [40]))
    assert embedding.weight.numel() == 0
    assert torch.equal(embedding(IDS), widened(weight)[IDS])


@pytest.mark.parametrize(
    ("dtype", "scheme"), [(torch.float32, "none"), (torch.float16, "none"), (torch.bfloat16, "int8")]
)
def test_where_a_head_cannot_be_read_the_table_stays(dtype: torch.dtype, scheme: Quantization) -> None:
    if not can_pack(CPU, torch.bfloat16, scheme):
        pytest.skip(f"this machine has no products of {scheme} weights")
    table = random_table().to(dtype)
    embedding = tied(table, lambda head: head.pack(scheme))
    assert torch.equal(embedding(IDS), table[IDS].float())


def test_a_table_beside_a_head_of_its_own_may_be_quantised(make_checkpoint: Callable[..., Path]) -> None:
    needs_compiled_kernels()
    checkpoint = Checkpoint(make_checkpoint(tie_word_embeddings=False))
    model = build_model(read_config(checkpoint.config), torch.bfloat16, CPU, ALONE)
    assert isinstance(model, Decoder)
    checkpoint.load_into(model.checkpoint_tensors())
    table = model.checkpoint_tensors()["model.embed_tokens.weight"].clone()
    head = model.checkpoint_tensors()["lm_head.weight"].clone()
    weight = quantize_int4(table)
    model.pack("gguf", {"model.embed_tokens.weight": weight})
    embedding = model._embedding  # what a forward pass begins with
    assert embedding.weight.numel() == 0
    assert torch.equal(embedding(IDS), widened(weight)[IDS])
    hidden = torch.randn(3, table.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = hidden.float() @ head.float().T
    torch.testing.assert_close(model.compute_logits(hidden), expected, atol=0.05, rtol=0.05)
