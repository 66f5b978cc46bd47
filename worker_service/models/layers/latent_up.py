"""The up-projection of latents (`kv_b_proj`), absorbed: a query is multiplied by its head's key rows and the output of
attention by its value rows, so that keys and values of single heads are never computed (DeepSeek-AI, 2024)."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from kernels.ops import Ops, QuantizedWeight
from worker_service.models.layers.linear import Linear, Quantization, Quantized

_NAME = ".kv_b_proj.weight"


class LatentUp(Linear):
    """`weight`: [num_heads * (key_dim + value_dim), rank], by head key rows, then value rows. It stays in floating
    point, because keys multiply it transposed and scales lie along the other dimension. Products are
    batch-invariant."""

    def __init__(
        self, num_heads: int, sizes: tuple[int, int], rank: int, dtype: torch.dtype, device: torch.device, ops: Ops,
        *, deferred: bool = False,
    ) -> None:  # fmt: skip
        """Allocate the weight unfilled. sizes: key_dim and value_dim. deferred: see `Linear.allocate`."""
        rows = num_heads * sum(sizes)
        weight = torch.empty(rows, rank, dtype=dtype, device="meta" if deferred else device)
        super().__init__(weight, device=device, ops=ops, quantisable=False)
        self._sizes = sizes
        self._products: tuple[_OfHeads, _OfHeads] | None = None

    def pack(self, quantization: Quantization = "none") -> None:  # noqa: ARG002 (see the class)
        keys, values = self._of_heads()
        self._products = _packed(self._ops, keys.transpose(1, 2)), _packed(self._ops, values)
        self.free()

    def queries(self, x: Tensor) -> Tensor:
        """x: queries, [num_tokens, num_heads, key_dim]. Returns [num_tokens, num_heads, rank]."""
        if self._products is None:
            return torch.einsum("nhk,hkr->nhr", x, self._of_heads()[0])
        return self._products[0](x)

    def values(self, x: Tensor) -> Tensor:
        """x: the attention's outputs, [num_tokens, num_heads, rank]. Returns [num_tokens, num_heads, value_dim]."""
        if self._products is None:
            return torch.einsum("nhr,hvr->nhv", x, self._of_heads()[1])
        return self._products[1](x)

    def _of_heads(self) -> tuple[Tensor, Tensor]:
        """Key rows [num_heads, key_dim, rank] and value rows [num_heads, value_dim, rank]."""
        keys, values = torch.split(
            self.weight.view(-1, sum(self._sizes), self.weight.shape[1]), list(self._sizes), dim=1
        )
        return keys, values


_OfHeads = Callable[[Tensor], Tensor]
"""A product for each head: from [num_tokens, num_heads, inputs] to [num_tokens, num_heads, outputs]."""


def _packed(ops: Ops, weights: Tensor) -> _OfHeads:
    """weights: [num_heads, outputs, inputs]. One token of 16 heads, 128 to 512 in bf16 on a CPU: 93 µs."""
    if ops.GROUPED_PRODUCTS:
        stack = weights.clone(memory_format=torch.contiguous_format)
        numbers = torch.arange(1, len(stack) + 1, device=stack.device)

        def multiply_together(x: Tensor) -> Tensor:
            """Heads are the experts of one launch, so that a GPU has no launch for each head."""
            # One token's flattened heads would be a strided view.
            rows = x.transpose(0, 1).flatten(0, 1).contiguous()
            found = ops.grouped_linear(rows, stack, numbers * len(x))
            return found.view(len(stack), len(x), stack.shape[1]).transpose(0, 1)

        return multiply_together
    products = [ops.pack_batch_invariant(weight.clone(memory_format=torch.contiguous_format)) for weight in weights]

    def multiply(x: Tensor) -> Tensor:
        return torch.stack([product(rows, None) for product, rows in zip(products, x.unbind(1), strict=True)], dim=1)

    return multiply


class WithoutLatentUp(Mapping[str, QuantizedWeight]):
    """Quantised weights without those of `LatentUp`, which are converted to floating point."""

    def __init__(self, weights: Quantized) -> None:
        self._weights = weights

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._weights if not name.endswith(_NAME))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._weights and not str(name).endswith(_NAME)

    def __getitem__(self, name: str) -> QuantizedWeight:
        if name.endswith(_NAME):
            raise KeyError(name)
        return self._weights[name]
