"""Finds the KV cache's sizes of a network in transformers' code, and whether the network can run. The network runs once
over two tokens on the meta device. Sizes are taken from computed tensors, because families name heads and layers
differently in config.json."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from worker_service.models.borrowed.attention import NAME, within
from worker_service.models.borrowed.weights import checkpoint_places, tied_tensors
from worker_service.models.config.config_limits import check_padding


@dataclass(frozen=True)
class Survey:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """See `ModelConfig.windows`."""
    hidden_size: int
    tied: Mapping[str, str]
    """See `ModelConfig.tied`."""
    ignored_tensors: Collection[str]
    """See `ModelConfig.ignored_tensors`."""
    rotary_dims: frozenset[int]
    """Rotated elements of a head; several entries if layers differ."""


class _Observer:
    """An `Attention` that records shapes and windows, and computes nothing."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.windows: list[int | None] = []

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        del scale, soft_cap, sinks
        if value.shape != key.shape or query.shape[2] != key.shape[2] or query.shape[1] % key.shape[1]:
            raise ValueError(
                f"its queries, keys and values have heads that do not match: {_sizes(query)}, {_sizes(key)} and "
                f"{_sizes(value)}"
            )
        if window is not None and window < 1:
            raise ValueError(f"its sliding_window is {window}; it must be at least 1")
        self.shapes.append((key.shape[1], key.shape[2]))
        self.windows.append(window)
        return torch.empty_like(query)


def survey(network_class: Any, config: Any) -> Survey:
    """Raises a ValueError with the reason if the network cannot run."""
    observer = _Observer()
    try:
        with torch.device("meta"), torch.inference_mode():
            # "batched_mm" is the only implementation of experts that does not read tensors' values.
            network = network_class._from_config(
                _without_data(config), attn_implementation=NAME, experts_implementation="batched_mm"
            )
            body = network.get_decoder()
            if body is network or "position_ids" not in signature(body.forward).parameters:
                raise ValueError("its code takes no positions")
            if any(isinstance(module, torch.nn.Conv1d) for module in network.modules()):
                raise ValueError("it has convolutions, which need tokens outside a chunk")
            checkpoint_places(network)
            tokens = torch.zeros((1, 2), dtype=torch.long)
            with within(observer):
                output = body(
                    input_ids=tokens, position_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False
                )
    except ValueError:
        raise
    except Exception as error:
        if "Padding_idx" in str(error):
            check_padding(config)
        # The network's code may raise any error on the meta device.
        raise ValueError(f"its code does not run with our attention: {error or type(error).__name__}") from error
    if not observer.shapes:
        raise ValueError("it has no layer with attention")
    if len(observer.shapes) < config.num_hidden_layers:
        raise ValueError(
            f"{len(observer.shapes)} of its {config.num_hidden_layers} layers use an attention that can be replaced"
        )
    if len(set(observer.shapes)) > 1:
        sizes = " and ".join(f"{heads} x {size}" for heads, size in sorted(set(observer.shapes)))
        raise ValueError(f"its layers have keys of different sizes, {sizes}")
    hidden_size = output.last_hidden_state.shape[-1]
    return Survey(
        len(observer.shapes),
        *observer.shapes[0],
        tuple(observer.windows),
        hidden_size,
        {name: other for name, (_, other) in tied_tensors(network).items()},
        tuple(network._keys_to_ignore_on_load_unexpected or ()),
        frozenset(2 * len(buffer) for name, buffer in network.named_buffers() if name.endswith("inv_freq")),
    )


def _without_data(config: Any) -> Any:
    """A copy whose rotary frequencies do not depend on the positions' values; shapes are the same."""
    other = copy.deepcopy(config)
    parameters = getattr(other, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
            rope["rope_type"] = "default"
    return other


def _sizes(heads: Tensor) -> str:
    return f"{heads.shape[1]} x {heads.shape[2]}"
