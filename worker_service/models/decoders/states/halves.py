"""The first half of a decoder layer with states. `layer_cache` is the layer's states, in the order of the mixer's
`needs`. A rank holds the whole half.

Kernels compute all exponentials of a token's numbers. torch computes the last elements of a tensor by other
instructions, so a token's bits would depend on its batch."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.inputs import AttentionMetadata
from kernels.ops import Ops
from worker_service.models.decoders.mlp import Projection
from worker_service.models.layers.linear import Linear
from worker_service.models.layers.mixers import DeltaNet, Mamba2, ShortConvolution

States = tuple[Tensor, ...]


class ConvolutionHalf:
    """`out(c * convolution(b * x))`, where b, c and x are projections of the input."""

    def __init__(
        self, mixer: ShortConvolution, hidden: int, dtype: torch.dtype, device: torch.device, ops: Ops,
        *, deferred: bool,
    ) -> None:  # fmt: skip
        """Allocate weights unfilled. deferred: see `Linear.allocate`."""
        self._mixer, self._hidden, self._ops = mixer, hidden, ops
        allocate = partial(Linear.allocate, dtype=dtype, device=device, deferred=deferred, ops=ops)
        self._in = allocate(3 * mixer.channels, hidden, mixer.biased)
        self._weight = torch.empty(mixer.channels, mixer.taps, dtype=dtype, device=device)
        self._bias = torch.empty(mixer.channels, dtype=dtype, device=device) if mixer.biased else None
        self._out = allocate(hidden, mixer.channels, mixer.biased, wide=ops.WIDE_PRODUCTS)

    @property
    def projections(self) -> list[Projection]:
        return [(self._in, {"conv.in_proj": 3 * self._mixer.channels}), (self._out, {"conv.out_proj": self._hidden})]

    @property
    def adapted(self) -> list[Projection]:
        return self.projections

    @property
    def vectors(self) -> dict[str, Tensor]:
        return _convolution("conv.conv", self._weight, self._bias)

    def __call__(
        self, x: Tensor, by_position: Any, layer_cache: States, slots: Tensor,  # noqa: ARG002 (attention uses them)
        attention: AttentionMetadata, adapter_slots: Tensor | None,
    ) -> Tensor:  # fmt: skip
        (states,) = layer_cache
        b, c, inner = self._in(x, adapter_slots).chunk(3, dim=1)
        mixed = self._ops.short_convolution(b * inner, self._weight, self._bias, states, attention, None)
        return self._out(c * mixed, adapter_slots)


class DeltaHalf:
    """`out(norm(delta rule(convolution(q, k, v))) * silu(z))`."""

    def __init__(
        self, mixer: DeltaNet, hidden: int, eps: float, dtype: torch.dtype, device: torch.device, ops: Ops,
        *, deferred: bool,
    ) -> None:  # fmt: skip
        """Allocate weights unfilled. deferred: see `Linear.allocate`."""
        self._mixer, self._hidden, self._eps, self._ops = mixer, hidden, eps, ops
        allocate = partial(Linear.allocate, dtype=dtype, device=device, deferred=deferred, ops=ops)
        self._in = allocate(2 * (mixer.keys + mixer.values), hidden, False)
        # Weights are never quantised, and the product is float32: errors of a decay add up in the state.
        rates = torch.empty(2 * mixer.value_heads, hidden, dtype=dtype, device=device)
        self._rates = Linear(rates, wide=True, quantisable=False, ops=ops)
        self._weight = torch.empty(2 * mixer.keys + mixer.values, mixer.taps, dtype=dtype, device=device)
        self._a_log, self._dt_bias = torch.empty(2, mixer.value_heads, device=device)
        self._norm = torch.empty(mixer.value_dim, dtype=dtype, device=device)
        self._out = allocate(hidden, mixer.values, False, wide=ops.WIDE_PRODUCTS)

    @property
    def projections(self) -> list[Projection]:
        mixer, heads = self._mixer, self._mixer.value_heads
        if mixer.by_head:
            inputs = {"linear_attn.in_proj_qkvz": 2 * (mixer.keys + mixer.values)}
            rates = {"linear_attn.in_proj_ba": 2 * heads}
        else:
            inputs = {
                "linear_attn.in_proj_qkv": 2 * mixer.keys + mixer.values, "linear_attn.in_proj_z": mixer.values
            }  # fmt: skip
            rates = {"linear_attn.in_proj_b": heads, "linear_attn.in_proj_a": heads}
        return [(self._in, inputs), (self._rates, rates), (self._out, {"linear_attn.out_proj": self._hidden})]

    @property
    def adapted(self) -> list[Projection]:
        return self.projections

    @property
    def vectors(self) -> dict[str, Tensor]:
        return _convolution("linear_attn.conv1d", self._weight, None) | {
            "linear_attn.A_log": self._a_log,
            "linear_attn.dt_bias": self._dt_bias,
            "linear_attn.norm.weight": self._norm,
        }

    def __call__(
        self, x: Tensor, by_position: Any, layer_cache: States, slots: Tensor,  # noqa: ARG002 (attention uses them)
        attention: AttentionMetadata, adapter_slots: Tensor | None,
    ) -> Tensor:  # fmt: skip
        mixer, ops, (convolved, states) = self._mixer, self._ops, layer_cache
        qkv, z = self._inputs(self._in(x, adapter_slots))
        b, a = self._of_heads(self._rates(x, adapter_slots), 1)
        beta = _activated(ops, "sigmoid", b, torch.ones_like(b))
        decay = _activated(ops, "softplus", a + self._dt_bias, self._a_log.exp().neg().expand_as(a))
        mixed = ops.short_convolution(qkv, self._weight, None, convolved, attention, "silu")
        query, key, value = torch.split(mixed, [mixer.keys, mixer.keys, mixer.values], dim=1)
        query, key = (part.unflatten(1, (mixer.key_heads, mixer.key_dim)) for part in (query, key))  # type: ignore[no-untyped-call]
        value = value.unflatten(1, (mixer.value_heads, mixer.value_dim))  # type: ignore[no-untyped-call]
        attended = ops.gated_delta_rule(query, key, value, decay, beta, states, attention, True)
        normed = ops.rms_norm(attended, self._norm, self._eps, 0.0, torch.float32).flatten(1)
        return self._out(_activated(ops, "silu", z.float(), normed).to(x.dtype), adapter_slots)

    def _inputs(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values [num_tokens, channels of the convolution], and gates [num_tokens, values]."""
        mixer = self._mixer
        if not mixer.by_head:
            qkv, z = torch.split(projected, [2 * mixer.keys + mixer.values, mixer.values], dim=1)
            return qkv, z
        of_head = mixer.values // mixer.key_heads
        by_head = projected.unflatten(1, (mixer.key_heads, -1))  # type: ignore[no-untyped-call]
        query, key, value, z = torch.split(by_head, [mixer.key_dim, mixer.key_dim, of_head, of_head], dim=2)
        return torch.cat([part.flatten(1) for part in (query, key, value)], dim=1), z.flatten(1)

    def _of_heads(self, rates: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Both numbers of each value head, [num_tokens, value_heads]."""
        if not self._mixer.by_head:
            b, a = rates.chunk(2, dim=dim)
            return b, a
        b, a = rates.unflatten(dim, (self._mixer.key_heads, 2, -1)).unbind(dim + 1)  # type: ignore[no-untyped-call]
        return b.flatten(dim), a.flatten(dim)


class MambaHalf:
    """`out(norm(scan(convolution(x, B, C), dt) * silu(z)))`, with a norm for each group of heads."""

    def __init__(
        self, mixer: Mamba2, hidden: int, eps: float, dtype: torch.dtype, device: torch.device, ops: Ops,
        *, deferred: bool,
    ) -> None:  # fmt: skip
        """Allocate weights unfilled. deferred: see `Linear.allocate`."""
        self._mixer, self._hidden, self._eps, self._ops = mixer, hidden, eps, ops
        allocate = partial(Linear.allocate, dtype=dtype, device=device, deferred=deferred, ops=ops)
        self._sizes = [mixer.inner, mixer.convolved, mixer.heads]
        self._in = allocate(sum(self._sizes), hidden, mixer.projection_bias)
        self._weight = torch.empty(mixer.convolved, mixer.taps, dtype=dtype, device=device)
        self._bias = torch.empty(mixer.convolved, dtype=dtype, device=device) if mixer.convolution_bias else None
        self._a_log, self._dt_bias, self._d = torch.empty(3, mixer.heads, device=device)
        self._norm = torch.empty(mixer.inner, dtype=dtype, device=device)
        self._ones = torch.ones(mixer.inner // mixer.groups, device=device)
        self._out = allocate(hidden, mixer.inner, mixer.projection_bias, wide=ops.WIDE_PRODUCTS)

    @property
    def projections(self) -> list[Projection]:
        return [(self._in, {"mamba.in_proj": sum(self._sizes)}), (self._out, {"mamba.out_proj": self._hidden})]

    @property
    def adapted(self) -> list[Projection]:
        return self.projections

    @property
    def vectors(self) -> dict[str, Tensor]:
        return _convolution("mamba.conv1d", self._weight, self._bias) | {
            "mamba.A_log": self._a_log,
            "mamba.dt_bias": self._dt_bias,
            "mamba.D": self._d,
            "mamba.norm.weight": self._norm,
        }

    def __call__(
        self, x: Tensor, by_position: Any, layer_cache: States, slots: Tensor,  # noqa: ARG002 (attention uses them)
        attention: AttentionMetadata, adapter_slots: Tensor | None,
    ) -> Tensor:  # fmt: skip
        mixer, ops, (convolved, states) = self._mixer, self._ops, layer_cache
        z, inner, steps = torch.split(self._in(x, adapter_slots), self._sizes, dim=1)
        mixed = ops.short_convolution(inner, self._weight, self._bias, convolved, attention, "silu")
        of_groups = mixer.groups * mixer.columns
        heads, b, c = torch.split(mixed, [mixer.inner, of_groups, of_groups], dim=1)
        heads = heads.unflatten(1, (mixer.heads, mixer.head_dim))  # type: ignore[no-untyped-call]
        b, c = (part.unflatten(1, (mixer.groups, mixer.columns)) for part in (b, c))  # type: ignore[no-untyped-call]
        steps = steps.float() + self._dt_bias
        dt = _activated(ops, "softplus", steps, torch.ones_like(steps))
        if mixer.least_step:
            dt.clamp_(min=mixer.least_step)
        scanned = ops.selective_scan(heads, dt, self._a_log.exp().neg(), b, c, self._d, states, attention)
        gated = _activated(ops, "silu", z.float(), scanned.flatten(1).float())
        by_group = gated.unflatten(1, (mixer.groups, -1))  # type: ignore[no-untyped-call]
        normed = ops.rms_norm(by_group, self._ones, self._eps).flatten(1) * self._norm
        return self._out(normed.to(x.dtype), adapter_slots)


def _activated(ops: Ops, activation: str, gate: Tensor, factor: Tensor) -> Tensor:
    """`activation(gate) * factor`, both [num_tokens, n] float32."""
    return ops.gated_activation(torch.cat((gate, factor), dim=1), activation)


def _convolution(name: str, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    """Checkpoints have a dimension of 1 between channels and taps."""
    found = {f"{name}.weight": weight[:, None]}
    return found if bias is None else found | {f"{name}.bias": bias}
