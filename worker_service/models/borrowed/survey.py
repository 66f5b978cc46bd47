"""Finds what cache each layer of a network in transformers' code needs, and whether the network can run. The
network runs once over two tokens, if possible on the meta device. Sizes are taken from computed tensors, because
families name heads and layers differently in config.json."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from worker_service.models.borrowed.attention import NAME, Softmax, within
from worker_service.models.borrowed.network import Body, attention_of
from worker_service.models.borrowed.states import has_states, within_states
from worker_service.models.borrowed.weights import checkpoint_places, tied_tensors
from worker_service.models.causal_model import widest
from worker_service.models.config.config_limits import check_padding
from worker_service.models.layer_needs import LayerKeys, LayerStates, State

NUM_TOKENS = 2
ATTENTION = frozenset({"chunked_attention", "full_attention", "sliding_attention"})
"""Types of layers that keep keys and values, and no states."""


@dataclass(frozen=True)
class Survey:
    keys: tuple[LayerKeys, ...]
    """Keys and values in the cache, in the order in which layers store them. The window is the largest of the layers
    that read them."""
    readers: tuple[int, ...]
    """The number in `keys` that each call of attention reads. A layer without keys and values of its own reads an
    earlier layer's."""
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
    uncalled: frozenset[str]
    """Names of linear layers that the body does not call as modules. Adapters have no effect there."""


class _Observer:
    """An `Attention` and `States` that record shapes and options, and compute nothing."""

    def __init__(self) -> None:
        self.keys: list[LayerKeys] = []
        self.readers: list[int] = []
        self.options: list[Softmax] = []
        self._stored: dict[tuple[object, object], int] = {}
        """The number in `keys` of keys and values, by their memory."""
        self._kept: list[tuple[Tensor, Tensor]] = []
        """So that no memory is used twice."""
        self.layers: dict[int, list[State]] = {}
        self._layer: list[State] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        if value.shape[:2] != key.shape[:2] or query.shape[2] != key.shape[2] or query.shape[0] % key.shape[0]:
            raise ValueError(
                f"its queries, keys and values have heads that do not match: {_sizes(query)}, {_sizes(key)} and "
                f"{_sizes(value)}"
            )
        if softmax.window is not None and softmax.window < 1:
            kind = "attention_chunk_size" if softmax.chunked else "sliding_window"
            raise ValueError(f"its {kind} is {softmax.window}; it must be at least 1")
        place = _memory(key), _memory(value)
        if place not in self._stored:
            self._kept.append((key, value))
            self._stored[place] = len(self.keys)
            size = max(key.shape[2], value.shape[2])
            self.keys.append(LayerKeys(key.shape[0], size, window=softmax.window, chunked=softmax.chunked))
        number = self._stored[place]
        known = self.keys[number]
        if (known.window, known.chunked) != (softmax.window, softmax.chunked):
            self.keys[number] = replace(known, window=widest((known.window, softmax.window)), chunked=False)
        self.readers.append(number)
        self.options.append(softmax)
        return query.new_empty((query.shape[1], query.shape[0], value.shape[2]))

    def begin_layer(self, number: int) -> None:
        self._layer = self.layers.setdefault(number, [])

    def short_convolution(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        del bias, activation
        self._layer.append(State((weight.shape[0], weight.shape[1] - 1), x.dtype is torch.float32))
        return torch.empty_like(x)

    def gated_delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, *, normalize: bool
    ) -> Tensor:
        del decay, beta, normalize
        if value.shape[1] % key.shape[1] or query.shape != key.shape:
            raise ValueError(f"its {value.shape[1]} linear value heads cannot share {key.shape[1]} key heads")
        self._layer.append(State((value.shape[1], key.shape[2], value.shape[2]), is_wide=True))
        return torch.empty_like(value)

    def selective_scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None) -> Tensor:
        del dt, a, c, d
        if x.shape[1] % b.shape[1]:
            raise ValueError(f"its {x.shape[1]} heads of state-space layers cannot share {b.shape[1]} groups")
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


def _memory(tensor: Tensor) -> object:
    """Identifies a tensor; tensors on the meta device have no addresses."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.stride(), tensor.shape


def survey(network_class: Any, config: Any) -> Survey:
    """Raises a ValueError with the reason if the network cannot run."""
    try:
        with torch.device("meta"), torch.inference_mode():
            # "batched_mm" is the only implementation of experts that does not read tensors' values. The network
            # is bfloat16, so that a float32 state is one that is always float32.
            network = network_class._from_config(
                _without_data(config),
                attn_implementation=attention_of(network_class),
                experts_implementation="batched_mm",
                **({"dtype": torch.bfloat16} if has_states(network_class) else {}),
            )
            body = Body(network.eval())
            _refuse_convolutions(body.module)
            checkpoint_places(network)
            uncalled = {id(module): name for name, module in network.named_modules() if type(module) is nn.Linear}
            for module in body.module.modules():
                module.register_forward_hook(lambda called, *_: uncalled.pop(id(called), None) and None)
            observer, hidden = _observe(network, body)
    except ValueError:
        raise
    except Exception as error:
        if "Padding_idx" in str(error):
            check_padding(config)
        # The network's code may raise any error on the meta device.
        if "meta" in str(error):
            raise ValueError("its code reads computed numbers, so that its cache's sizes cannot be found") from error
        if isinstance(error, ImportError):
            why = " ".join(str(error).split()).partition(". ")[0]
            raise ValueError(f"it needs a package that is not installed: {why}") from error
        if isinstance(error, KeyError) and NAME in error.args:
            raise ValueError("its code runs with no attention but transformers' own") from error
        raise ValueError(f"its code does not run with our attention: {str(error) or type(error).__name__}") from error
    keys, states = observer.keys, [LayerStates(tuple(states)) for states in observer.layers.values() if states]
    text = config.get_text_config(decoder=True)
    if network_class._is_stateful and not states and not {*_kinds(text)} <= ATTENTION:
        raise ValueError("it keeps states of a kind that is not supported")
    has_slopes = bool(keys) and all(softmax.slopes is not None for softmax in observer.options)
    if keys and not (body.takes_positions or has_slopes):
        raise ValueError("its code takes no positions")
    if not keys and not states:
        raise ValueError("it has no layer with attention")
    num_layers = getattr(text, "decoder_layers", text.num_hidden_layers) - _num_without_mixer(text)
    if (found := len(observer.readers) + len(states)) < num_layers:
        raise ValueError(f"only {found} of its {num_layers} layers have attention or states that can be replaced")
    return Survey(
        tuple(keys),
        tuple(observer.readers),
        tuple(states),
        hidden.shape[-1],
        {name: other for name, (_, other) in tied_tensors(network).items()},
        tuple(network._keys_to_ignore_on_load_unexpected or ()),
        frozenset(2 * len(buffer) for name, buffer in network.named_buffers() if name.endswith("inv_freq")),
        has_slopes,
        body.first_position,
        frozenset(uncalled.values()),
    )


def _observe(network: Any, body: Body) -> tuple[_Observer, Tensor]:
    """Run the network over two tokens. Returns the calls of attention and the hidden states. network: on the meta
    device. If its code reads computed numbers, it runs on the CPU with zeros for weights, which take no memory."""
    tokens = torch.zeros(NUM_TOKENS, dtype=torch.long)
    try:
        with within(observer := _Observer()), within_states(observer):
            return observer, body(tokens, tokens)
    except Exception as error:
        if "meta" not in str(error):
            raise
    with torch.device("cpu"), _ZeroProducts(), within(observer := _Observer()), within_states(observer):
        for module in network.modules():
            for name, weight in module._parameters.items():
                module._parameters[name] = None if weight is None else nn.Parameter(_zeros(weight), False)
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else _zeros(buffer)
        tokens = torch.zeros(NUM_TOKENS, dtype=torch.long)
        return observer, body(tokens, tokens)


class _ZeroProducts(TorchFunctionMode):
    """Replaces linear layers by zeros. torch would copy their expanded weights (stride 0): 21 s for Gemma 3n."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        called = _zero_product if function is nn.functional.linear else function
        return called(*args, **(kwargs or {}))


def _zero_product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002, ARG001 (torch's)
    return input.new_zeros((*input.shape[:-1], weight.shape[0]))


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _refuse_convolutions(body: nn.Module) -> None:
    """Raise ValueError when a convolution runs that would compute a step's tokens as one sequence. Layers with states
    pass the weights of their convolutions to functions, so they run no convolution."""

    def refuse(*_: object) -> None:
        raise ValueError("it has convolutions, which need tokens outside a chunk")

    inner = {id(part) for module in body.modules() if has_states(type(module)) for part in module.modules()}
    for module in body.modules():
        if "Conv" in type(module).__name__ and type(module) is not Conv1D and id(module) not in inner:
            module.register_forward_pre_hook(refuse)


def _kinds(text: Any) -> Sequence[str]:
    """Each layer's type, or one unknown type."""
    return getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ("unknown",)


def _num_without_mixer(text: Any) -> int:
    """Layers that only have a feed-forward network."""
    return sum(kind in ("mlp", "moe") for kind in _kinds(text))


def _without_data(config: Any) -> Any:
    """A copy whose rotary frequencies do not depend on the positions' values; shapes are the same."""
    other = copy.deepcopy(config)
    parameters = getattr(other.get_text_config(decoder=True), "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
            rope["rope_type"] = "default"
    return other


def _sizes(heads: Tensor) -> str:
    return f"{heads.shape[0]} x {heads.shape[2]}"
