"""Parts for networks of transformers: allocation, packed linear layers, and a head that runs without the body.

Logits are a product in float32. The network's own code then caps and scales the logits.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from worker_service.models.borrowed.weights import tied_tensors
from worker_service.models.layers.linear import Linear


def build_network(config: Any, dtype: torch.dtype, device: torch.device, attention: str, **options: Any) -> Any:
    """Allocate a network of a configuration's `network_class`, with weights that have no values yet.

    Tensors that the configuration determines, such as frequencies, are filled. Tied tensors share memory, except the
    config's `own_tensors`. attention: the network's `attn_implementation`.
    """
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


class Head:
    """The network's head, which computes logits from the body's states."""

    def __init__(self, network: Any, body: nn.Module) -> None:
        self._network = _with_part(network, _path(network, body), _GivenBody())
        self._product: PackedLinear | None = None
        if type(product := network.get_output_embeddings()) is nn.Linear:
            self._product = PackedLinear(product, wide=True)
            self._network = _with_part(self._network, _path(network, product), self._product)

    def pack(self) -> None:
        """Pack the current weights of the product."""
        if self._product is not None:
            self._product.pack()

    def __call__(self, **inputs: Any) -> Tensor:
        """Compute logits. inputs: the network's inputs, but the body's states, [1, rows, hidden_size], replace
        embeddings. Returns [rows, vocabulary_size] float32."""
        logits: Tensor = self._network(**inputs, use_cache=False).logits[0]
        return logits.float()


class PackedLinear(nn.Module):
    """Replaces a linear layer of a network. `pack` packs the current weights."""

    def __init__(self, linear: nn.Linear, *, wide: bool = False) -> None:
        super().__init__()
        self.weight = linear.weight  # some networks read the weight's dtype
        self._linear = Linear(linear.weight, linear.bias, wide=wide)

    def pack(self) -> None:
        self._linear.pack()

    def forward(self, x: Tensor) -> Tensor:
        product = self._linear(x.flatten(0, -2))
        return product.view(*x.shape[:-1], product.shape[1])


class _GivenBody(nn.Module):
    """Replaces the body of a network. The input contains hidden states, which are returned unchanged."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> "_Output":
        return _Output(inputs_embeds)


class _Output:
    """The output of a body. The output contains hidden states. All other fields that heads read are None."""

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
    """A shallow copy of the module that shares its weights. In the copy, `part` replaces the submodule at `path`."""
    name, *rest = path
    other = copy.copy(module)
    other._modules = {**module._modules, name: _with_part(getattr(module, name), rest, part) if rest else part}
    return other
