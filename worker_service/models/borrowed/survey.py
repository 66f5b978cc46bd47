"""Finds the KV cache's sizes of a network in transformers' code, and whether the network can run. The network runs once
over two tokens on the meta device. Sizes are taken from computed tensors, because families name heads and layers
differently in config.json."""

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from worker_service.models.borrowed.attention import NAME, Softmax, within
from worker_service.models.borrowed.network import Body, attention_of
from worker_service.models.borrowed.states import has_states, within_states
from worker_service.models.borrowed.weights import checkpoint_places, tied_tensors
from worker_service.models.config.config_limits import check_padding
from worker_service.models.layer_needs import LayerKeys, LayerStates, State, has_one_kind

NUM_TOKENS = 2


@dataclass(frozen=True)
class Survey:
    keys: tuple[LayerKeys, ...]
    """Keys and values, in the order of the network's calls."""
    states: tuple[LayerStates, ...]
    """States, in the order of the network's layers."""
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
    """An `Attention` and `States` that record shapes and options, and compute nothing."""

    def __init__(self) -> None:
        self.keys: list[LayerKeys] = []
        self.options: list[Softmax] = []
        self.layers: dict[int, list[State]] = {}
        self._layer: list[State] = []

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

    def begin_layer(self, number: int) -> None:
        self._layer = self.layers.setdefault(number, [])

    def short_convolution(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        del bias, activation
        self._layer.append(State((weight.shape[0], weight.shape[1] - 1), x.dtype is torch.float32))
        return torch.empty_like(x)

    def gated_delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, *, normalize: bool
    ) -> Tensor:
        del query, decay, beta, normalize
        self._layer.append(State((value.shape[1], key.shape[2], value.shape[2]), is_wide=True))
        return torch.empty_like(value)

    def selective_scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None) -> Tensor:
        del dt, a, c, d
        self._layer.append(State((x.shape[1], x.shape[2], b.shape[2]), is_wide=True))
        return torch.empty_like(x)

    def tokens(self) -> Iterator[tuple[int, "_ObservedToken"]]:
        """The survey's tokens are one sequence."""
        self.begin_layer(-1 - len(self.layers))  # layers of such code do not say their number
        observed = _ObservedToken(self._layer)
        return ((row, observed) for row in range(NUM_TOKENS))


class _ObservedToken:
    def __init__(self, found: list[State]) -> None:
        self._found = found
        self._states: dict[str, Tensor] = {}

    def load(self, name: str) -> Tensor | None:
        return self._states.get(name)

    def store(self, name: str, state: Tensor) -> None:
        if name not in self._states:
            self._found.append(State(tuple(state.shape), state.dtype is torch.float32))
        self._states[name] = state


def survey(network_class: Any, config: Any) -> Survey:
    """Raises a ValueError with the reason if the network cannot run."""
    observer = _Observer()
    try:
        with torch.device("meta"), torch.inference_mode():
            # "batched_mm" is the only implementation of experts that does not read tensors' values. In 16 bits, states
            # that are always float32 are told apart.
            network = network_class._from_config(
                _without_data(config),
                attn_implementation=attention_of(network_class),
                experts_implementation="batched_mm",
                **({"dtype": torch.bfloat16} if has_states(network_class) else {}),
            )
            body = Body(network)
            _check_convolutions(body.module)
            checkpoint_places(network)
            tokens = torch.zeros(NUM_TOKENS, dtype=torch.long)
            with within(observer), within_states(observer):
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
    keys, states = observer.keys, [LayerStates(tuple(states)) for states in observer.layers.values() if states]
    if network_class._is_stateful and not states:
        raise ValueError("it keeps a state other than keys and values")
    has_slopes = bool(keys) and all(softmax.slopes is not None for softmax in observer.options)
    if keys and not (body.takes_positions or has_slopes):
        raise ValueError("its code takes no positions")
    if not keys and not states:
        raise ValueError("it has no layer with attention")
    text = config.get_text_config(decoder=True)
    num_layers = getattr(text, "decoder_layers", text.num_hidden_layers) - _num_without_mixer(text)
    if len(keys) + len(states) < num_layers:
        raise ValueError(f"{len(keys) + len(states)} of its {num_layers} layers use an attention that can be replaced")
    if keys and not has_one_kind(keys):
        known = sorted({(layer.num_kv_heads, layer.head_dim) for layer in keys})
        sizes = " and ".join(f"{heads} x {size}" for heads, size in known)
        raise ValueError(f"its layers have keys of different sizes, {sizes}")
    return Survey(
        tuple(keys),
        tuple(states),
        hidden.shape[-1],
        {name: other for name, (_, other) in tied_tensors(network).items()},
        tuple(network._keys_to_ignore_on_load_unexpected or ()),
        frozenset(2 * len(buffer) for name, buffer in network.named_buffers() if name.endswith("inv_freq")),
        has_slopes,
        body.first_position,
    )


def _check_convolutions(body: nn.Module) -> None:
    """Raise ValueError for convolutions that would compute a step's tokens as one sequence. Layers with states do not
    call their convolutions, but functions with their weights."""
    inner = {id(part) for module in body.modules() if has_states(type(module)) for part in module.modules()}
    for module in body.modules():
        if "Conv" in type(module).__name__ and type(module) is not Conv1D and id(module) not in inner:
            raise ValueError("it has convolutions, which need tokens outside a chunk")


def _num_without_mixer(text: Any) -> int:
    """Layers that only have a feed-forward network."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    return sum(kind in ("mlp", "moe") for kind in kinds)


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
