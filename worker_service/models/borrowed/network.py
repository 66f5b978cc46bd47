"""Parts for networks in transformers' code: weights, packed linear layers, and an output head without the body. The
head's product is float32; the network's own code caps and scales these logits."""

import copy
from collections.abc import Collection, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from worker_service.models.borrowed.attention import NAME
from worker_service.models.borrowed.older_attention import KeyCache, replace_products
from worker_service.models.borrowed.states import StateCache, has_states, replace_states
from worker_service.models.borrowed.weights import tied_tensors
from worker_service.models.causal_model import GivenEmbeddings
from worker_service.models.layers.linear import Linear

_PAD_PLACEHOLDERS = frozenset({"gemma4", "gemma4_unified"})


def build_network(config: Any, dtype: torch.dtype, device: torch.device, attention: str, **options: Any) -> Any:
    """Allocate the weights unfilled; tensors that follow from the configuration are filled. Tied tensors share memory,
    except those in `config.own_tensors`. attention: the `attn_implementation`."""
    with device, no_init_weights():
        network = config.network_class._from_config(
            copy.deepcopy(config.network), dtype=dtype, attn_implementation=attention, **options
        )
    network.tie_weights()
    tied = tied_tensors(network)
    for inner, _ in [tied[name] for name in config.own_tensors]:
        module, _, name = inner.rpartition(".")
        weight = torch.empty_like(network.get_parameter(inner))
        setattr(network.get_submodule(module), name, nn.Parameter(weight, requires_grad=False))
    return network.requires_grad_(False).eval()


def attention_of(network_class: Any) -> str:
    """The `attn_implementation` to build a decoder with. Older code knows only transformers' own; `Body` changes it."""
    return NAME if network_class._can_set_attn_implementation() else "eager"


class Body:
    """A network's layers without its output head."""

    def __init__(self, network: Any) -> None:
        self.module = network.get_decoder()
        if not isinstance(self.module, PreTrainedModel):  # ModernBERT's output head is named "decoder"
            self.module = network.base_model
        if self.module.get_output_embeddings() is not None:  # Llama 4's prefix is not the name of its body
            self.module = self.module.model
        self.module.config._attn_implementation_internal = NAME
        self._is_older = not self.module._can_set_attn_implementation()
        self._takes = signature(self.module.forward).parameters
        self._cache_name = ""
        if has_states(type(network)):
            replace_states(network)
            self._cache_name = "past_key_values" if "past_key_values" in self._takes else "cache_params"
        self._first, self._positions = self.first_position, torch.empty(0)
        self._placeholders = _placeholders(network.config)
        self._embeds = False
        for name, module in self.module.named_modules() if "position_ids" not in self._takes else ():
            if name.endswith("embed_positions") and "position_ids" in signature(module.forward).parameters:
                module.register_forward_pre_hook(self._with_positions, with_kwargs=True)
                self._embeds = True
        if self._is_older:
            replace_products(network)

    @property
    def takes_positions(self) -> bool:
        """Whether the positions given to a call have an effect."""
        return "position_ids" in self._takes or self._embeds

    @property
    def first_position(self) -> int:
        """Position of the first token: families like RoBERTa reserve smaller ones for padding."""
        for module in self.module.modules():
            if hasattr(module, "create_position_ids_from_input_ids"):
                if module.padding_idx is None:
                    raise ValueError("its pad_token_id is not stated, after which its positions begin")
                return 1 + int(module.padding_idx)
        return 0

    @property
    def embeds_size(self) -> int:
        """Elements of an embedding that a call takes in place of a token id; 0 if layers read token ids, too (Gemma 3n
        and 4)."""
        if "inputs_embeds" not in self._takes or getattr(self.module.config, "hidden_size_per_layer_input", False):
            return 0
        return int(self.module.get_input_embeddings().weight.shape[1])

    def __call__(self, token_ids: Tensor, positions: Tensor, given: GivenEmbeddings | None = None) -> Tensor:
        """token_ids: [num_tokens]; positions: [num_tokens], the first token's is 0. Returns hidden states, [num_tokens,
        hidden_size]."""
        positions = self._positions = positions + self._first if self._first else positions
        for placeholder in self._placeholders:
            token_ids = torch.where(token_ids == placeholder, self.module.config.pad_token_id, token_ids)
        # Without a mask, transformers would look for sequence boundaries in the positions.
        inputs: dict[str, Any] = {
            "input_ids": token_ids[None],
            "attention_mask": token_ids.new_ones((1, len(token_ids) + self._is_older)),
            "position_ids": positions[None],
            "past_key_values": KeyCache() if self._is_older else None,
        }
        if self._cache_name:  # transformers looks for no boundaries if there is a cache
            inputs |= {"attention_mask": None, self._cache_name: StateCache()}
        if given is not None:
            embeddings = self.module.get_input_embeddings()(token_ids)
            embeddings[given.rows] = given.embeddings.to(embeddings.dtype)
            inputs |= {"input_ids": None, "inputs_embeds": embeddings[None]}
        output = self.module(**{name: value for name, value in inputs.items() if name in self._takes}, use_cache=False)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _with_positions(self, _: nn.Module, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Inputs of an embedding that would count from the first token of a step."""
        return inputs, options | {"position_ids": self._positions}


def _placeholders(config: Any) -> Collection[int]:
    """Tokens for pictures and sounds that the network's code replaces by padding."""
    if config.model_type not in _PAD_PLACEHOLDERS:
        return ()
    named = (getattr(config, f"{kind}_token_id") for kind in ("image", "video", "audio"))
    return [number for number in named if number is not None]


class Head:
    """Computes logits from the body's hidden states."""

    def __init__(self, network: Any, body: nn.Module) -> None:
        # The module around the body of a multimodal network may read embeddings, so it is replaced, too.
        config = network.config
        is_part = not config.is_encoder_decoder and config.get_text_config(decoder=True) is not config
        whole = network.base_model if is_part and network.base_model is not network else body
        self._network = _with_part(network, _path(network, whole), _GivenBody(whole))
        self._product: PackedLinear | None = None
        if type(product := network.get_output_embeddings()) is nn.Linear:
            self._product = PackedLinear(product, wide=True)
            self._network = _with_part(self._network, _path(network, product), self._product)

    def pack(self) -> None:
        if self._product is not None:
            self._product.pack()

    def __call__(self, **inputs: Any) -> Tensor:
        """inputs: the network's inputs, with hidden states [1, rows, hidden_size] as embeddings. Returns [rows,
        vocabulary_size] float32."""
        logits: Tensor = self._network(**inputs, use_cache=False).logits[0]
        return logits.float()


class PackedLinear(nn.Module):
    """Replaces a linear layer. `pack` packs the layer's current weight."""

    def __init__(self, linear: nn.Linear, *, wide: bool = False) -> None:
        super().__init__()
        self.weight = linear.weight  # some networks' code reads the weight's dtype
        self._linear = Linear(linear.weight, linear.bias, wide=wide)

    def pack(self) -> None:
        self._linear.pack()

    def forward(self, x: Tensor) -> Tensor:
        return _multiply(self._linear, x)


def pack_linears(layers: Sequence[nn.Linear]) -> None:
    """Pack the weights of linear layers, whose products are then batch-invariant on CPUs, and free the originals. Their
    places have the same shape, contain NaN, and take no memory."""
    packed: dict[tuple[int, int], tuple[Linear, nn.Parameter]] = {}  # some layers share their weights
    for layer in layers:
        key = id(layer.weight), id(layer.bias)
        if key not in packed:
            nothing = torch.full((1, 1), torch.nan, dtype=layer.weight.dtype, device=layer.weight.device)
            place = nn.Parameter(nothing.expand(layer.weight.shape), requires_grad=False)
            packed[key] = Linear(layer.weight.detach(), layer.bias), place
    for layer in layers:
        linear, place = packed[id(layer.weight), id(layer.bias)]
        layer.weight = place
        layer.forward = partial(_multiply, linear)  # type: ignore[method-assign]
    for linear, _ in packed.values():
        linear.pack()


def _multiply(linear: Linear, x: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    product = linear(rows if rows.stride(1) == 1 else rows.contiguous())
    return product.view(*x.shape[:-1], product.shape[1])


class _GivenBody(nn.Module):
    """Replaces a network's body: returns `inputs_embeds`, the body's hidden states. Heads may read other attributes of
    the body, such as multipliers."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self._body = (body,)  # in a tuple, the body is no part of this module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body[0], name)

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> "_Output":
        return _Output(inputs_embeds)


class _Output:
    """A body's output as heads expect it; all fields but the hidden states are None."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _path(module: nn.Module, part: nn.Module) -> list[str]:
    path: str
    (path,) = (name for name, candidate in module.named_modules() if candidate is part)
    return path.split(".")


def _with_part(module: nn.Module, path: list[str], part: nn.Module) -> Any:
    """A shallow copy of `module`, with `part` at `path` and otherwise the same weights."""
    name, *rest = path
    other = copy.copy(module)
    other._modules = {**module._modules, name: _with_part(getattr(module, name), rest, part) if rest else part}
    return other
