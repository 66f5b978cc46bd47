"""Attention of vision networks in bfloat16 is that of torch, and bits of one image depend on nothing else."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from worker_service.models.images import attention


class _Layer(nn.Module):
    is_causal = False


@pytest.mark.parametrize("num_patches", [1, 7, 130])
@pytest.mark.parametrize("head_dim", [16, 64, 72, 80, 256])
def test_attention_is_that_of_torch_in_float32(num_patches: int, head_dim: int) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(1, num_patches, 3, head_dim).bfloat16().transpose(1, 2) for _ in range(3)]
    expected = functional.scaled_dot_product_attention(*(part.float() for part in parts)).transpose(1, 2)
    found, _ = attention._attend(_Layer(), *parts, None)
    assert (found.float() - expected).abs().max() < 0.02
    assert torch.equal(found, attention._attend(_Layer(), *parts, None)[0])


def test_a_mask_is_obeyed() -> None:
    parts = [torch.randn(1, 2, 5, 16).bfloat16() for _ in range(3)]
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    mask[..., 4:] = False
    found, _ = attention._attend(_Layer(), *parts, mask)
    expected, _ = attention._attend(_Layer(), parts[0], *(part[:, :, :4] for part in parts[1:]), None)
    assert (found.float() - expected.float()).abs().max() < 0.02
