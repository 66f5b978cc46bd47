"""Finds the KV cache's sizes of a network in transformers' code, and whether the network can run. The network runs once
over two tokens on the meta device. Sizes are taken from computed tensors, because families name heads and layers
differently in config.json."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from worker_service.models.borrowed.attention import NAME, Softmax, within
from worker_service.models.borrowed.network import Body, attention_of
from worker_service.models.borrowed.weights import checkpoint_places, tied_tensors
from worker_service.models.config.config_limits import check_padding
from worker_service.models.layer_needs import LayerKeys, has_one_kind


@dataclass(frozen=True)
class Survey:
    keys: tuple[LayerKeys, ...]
    """Keys and values, in the order of the network's calls."""
    hidden_size: int
    tied: Mapping[str, str]
    """See `ModelConfig.tied`."""
    ignored_tensors: Collection[str]
    """See `ModelConfig.ignored_tensors`."""
    rotary_dims: frozenset[int]
    """Rotated elements of a head; several entries if layers differ."""
    has_slopes: bool
    """Whether scores fall with the distance in all layers (ALiBi)."""
    first_position: int
    """See `Body.first_position`."""


class _Observer:
    """An `Attention` that records shapes and options, and computes nothing."""

    def __init__(self) -> None:
        self.keys: list[LayerKeys] = []
        self.options: list[Softmax] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        if value.shape != key.shape or query.shape[2] != key.shape[2] or query.shape[1] % key.shape[1]:
            raise ValueError(
                f"its queries, keys and values have heads that do not match: {_sizes(query)}, {_sizes(key)} and "
                f"{_sizes(value)}"
            )
        if softmax.window is not None and softmax.window < 1:
            raise ValueError(f"its sliding_window is {softmax.window}; it must be at least 1")
        self.keys.append(LayerKeys(key.shape[1], key.shape[2], window=softmax.window))
        self.options.append(softmax)
        return torch.empty_like(query)


def survey(network_class: Any, config: Any) -> Survey:
    """Raises a ValueError with the reason if the network cannot run."""
    observer = _Observer()
    try:
        with torch.device("meta"), torch.inference_mode():
            # "batched_mm" is the only implementation of experts that does not read tensors' values.
            network = network_class._from_config(
                _without_data(config),
                attn_implementation=attention_of(network_class),
                experts_implementation="batched_mm",
            )
            body = Body(network)
            if any("Conv" in type(module).__name__ and type(module) is not Conv1D for module in body.module.modules()):
                raise ValueError("it has convolutions, which need tokens outside a chunk")
            checkpoint_places(network)
            tokens = torch.zeros(2, dtype=torch.long)
            with within(observer):
                hidden = body(tokens, tokens)
    except ValueError:
        raise
    except Exception as error:
        if "Padding_idx" in str(error):
            check_padding(config)
        # The network's code may raise any error on the meta device.
        if "meta" in str(error):
            raise ValueError("its code reads computed numbers, so that its cache's sizes cannot be found") from error
        if isinstance(error, KeyError) and NAME in error.args:
            raise ValueError("its code runs with no attention but transformers' own") from error
        raise ValueError(f"its code does not run with our attention: {error or type(error).__name__}") from error
    has_slopes = all(softmax.slopes is not None for softmax in observer.options)
    if not (body.takes_positions or has_slopes):
        raise ValueError("its code takes no positions")
    keys = observer.keys
    if not keys:
        raise ValueError("it has no layer with attention")
    text = config.get_text_config(decoder=True)
    num_layers = getattr(text, "decoder_layers", text.num_hidden_layers)
    if len(keys) < num_layers:
        raise ValueError(f"{len(keys)} of its {num_layers} layers use an attention that can be replaced")
    if not has_one_kind(keys):
        known = sorted({(layer.num_kv_heads, layer.head_dim) for layer in keys})
        sizes = " and ".join(f"{heads} x {size}" for heads, size in known)
        raise ValueError(f"its layers have keys of different sizes, {sizes}")
    return Survey(
        tuple(keys),
        hidden.shape[-1],
        {name: other for name, (_, other) in tied_tensors(network).items()},
        tuple(network._keys_to_ignore_on_load_unexpected or ()),
        frozenset(2 * len(buffer) for name, buffer in network.named_buffers() if name.endswith("inv_freq")),
        has_slopes,
        body.first_position,
    )


def _without_data(config: Any) -> Any:
    """A copy whose rotary frequencies do not depend on the positions' values; shapes are the same."""
    other = copy.deepcopy(config)
    parameters = getattr(other.get_text_config(decoder=True), "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
            rope["rope_type"] = "default"
    return other


def _sizes(heads: Tensor) -> str:
    return f"{heads.shape[1]} x {heads.shape[2]}"
