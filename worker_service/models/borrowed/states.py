"""Runs layers with states in transformers' code: its functions for convolutions, delta rules and scans get states as
arguments, and ours read the states of a step's sequences.

The functions are found by their names in the modules of the network's classes. Outside of `within_states` they are
transformers' own. Layers with code of their own are listed in `_LAYERS`, or in `_TOKEN_BY_TOKEN` if their code is
correct for one token at a time, with each state loaded and stored.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

_OURS = "is_pagewires"
"""Attribute of our replacements, which are not replaced again."""


class TokenStates(Protocol):
    """The states of one layer and one sequence, for a layer that computes one token at a time."""

    def load(self, name: str) -> Tensor | None:
        """The state, without the sequence's dimension; None before the sequence's first token."""

    def store(self, name: str, state: Tensor) -> None: ...


class States(Protocol):
    """The states of one forward pass. Each operation has the network's next state, in the order of its code."""

    def begin_layer(self, number: int) -> None:
        """The next operations are a layer's. Not called for layers that compute token by token."""

    def short_convolution(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor: ...

    def gated_delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, *, normalize: bool
    ) -> Tensor: ...

    def selective_scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None) -> Tensor: ...

    def tokens(self) -> Iterator[tuple[int, TokenStates]]:
        """Each row of the step, with its sequence's states in one layer."""


_states: ContextVar[States | None] = ContextVar("states", default=None)


@contextmanager
def within_states(states: States) -> Iterator[None]:
    """Compute layers with states of transformers' networks with `states` in this block."""
    token = _states.set(states)
    try:
        yield
    finally:
        _states.reset(token)


def _current() -> States:
    states = _states.get()
    assert states is not None
    return states


class StateCache:
    """A cache as transformers' layers use it, for one forward pass. It stores nothing: `States` and `attend` do. It has
    no states, so that layers call the functions for any number of tokens."""

    is_compileable = False

    def get_conv_state(self, layer_idx: int, *_: object, **__: object) -> None:
        _current().begin_layer(layer_idx)

    get_recurrent_state = get_conv_state

    def update_conv_state(self, x: Tensor, layer_idx: int, *_: object, **__: object) -> Tensor:
        _current().begin_layer(layer_idx)
        return x

    def update_recurrent_state(self, *_: object, **__: object) -> None: ...

    def update(self, key: Tensor, value: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return key, value

    def has_previous_state(self, *_: object) -> bool:
        return False

    def is_recording_past(self, *_: object) -> bool:
        return False

    def get_seq_length(self, *_: object) -> int:
        return 0

    def get_query_offset(self, *_: object) -> int:
        return 0

    def get_mask_sizes(self, num_tokens: int, *_: object) -> tuple[int, int]:
        return num_tokens, 0


class _TokenCache:
    """A cache as transformers' layers use it, of one sequence, for one token."""

    def __init__(self, states: TokenStates) -> None:
        self._states = states

    def get_conv_state(self, *_: object, state_idx: int = 0) -> Tensor | None:
        return self._load(f"convolution {state_idx}")

    def get_recurrent_state(self, *_: object, state_idx: int = 0) -> Tensor | None:
        return self._load(f"recurrent {state_idx}")

    def update_conv_state(self, state: Tensor, *_: object, state_idx: int = 0, **__: object) -> Tensor:
        self._states.store(f"convolution {state_idx}", state[0])
        return state

    def update_recurrent_state(self, state: Tensor, *_: object, state_idx: int = 0, **__: object) -> Tensor:
        self._states.store(f"recurrent {state_idx}", state[0])
        return state

    def _load(self, name: str) -> Tensor | None:
        state = self._states.load(name)
        return None if state is None else state[None]


def _convolve(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """hidden_states: [1, channels, num_tokens], also the result."""
    ours = "silu" if activation in ("silu", "swish") else None
    x = hidden_states[0].T.to(weight.dtype)
    result = _current().short_convolution(x, weight, bias, ours)
    if activation is not None and ours is None:
        result = ACT2FN[activation](result)
    return result.T[None].to(hidden_states.dtype)


def _apply_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """query, key: [1, num_tokens, key_heads, key_dim]; g: [1, num_tokens, heads] or [..., key_dim]. Returns [1,
    num_tokens, heads, value_dim], and no state."""
    attended = _current().gated_delta_rule(
        query[0], key[0], value[0], g[0].float(), beta[0], normalize=use_qk_l2norm_in_kernel
    )
    return attended[None], query.new_empty(0)


def _scan_chunks(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803 (transformers' names)
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> Any:
    """Mamba-2. hidden_states: [1, num_tokens, heads, size], also the result; dt: [1, num_tokens, heads]; B, C: [1,
    num_tokens, groups, columns]."""
    steps = _steps(dt[0], dt_bias, dt_softplus).clamp(*dt_limit)
    result = _current().selective_scan(hidden_states[0], steps, A, B[0], C[0], D)[None]
    return (result, result.new_empty(0)) if return_final_states else result


def _scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """Mamba. hidden_states, dt, z: [1, channels, num_tokens], also the result; A: [channels, columns]; B, C: [1,
    columns, num_tokens]."""
    steps, skip = _steps(dt[0].T, delta_bias, delta_softplus), None if D is None else D[None]
    x, b, c = (part[0].T[:, None] for part in (hidden_states, B, C))
    result = _current().selective_scan(x, steps[:, None], A[None], b, c, skip)[:, 0].T[None]
    if z is not None:
        result = result * functional.silu(z)
    return (result, result.new_empty(0)) if return_last_state else result


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """dt: [num_tokens, columns]. Returns float32."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    if not softplus:
        return dt.float()
    # torch computes the last numbers of a tensor, fewer than two vectors, by other code with other roundings. With
    # whole vectors in each row, a token's numbers do not depend on the number of tokens.
    columns = dt.shape[1]
    whole = functional.pad(dt, (0, -columns % _TWO_VECTORS))
    return functional.softplus(whole)[:, :columns].float()


_TWO_VECTORS = 64
"""Numbers of 16 bits in two vectors of AVX-512."""


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _apply_delta_rule,
    "chunk_kimi_delta_attention": _apply_delta_rule,
    "mamba2_chunk_scan": _scan_chunks,
    "mamba_selective_scan": _scan,
}
"""Replacements of transformers' functions that compute any number of tokens."""
_WITHOUT_EFFECT = frozenset(
    {"chunk_size", "output_final_state", "position_embeddings", "use_associative_scan", "use_mambapy"}
)
"""Options of these functions that choose only how they compute, or that they do not read."""


def _attend_lightning(layer: Any, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
    """MiniMax's lightning attention (Qin et al., 2024). hidden_states: [1, num_tokens, hidden_size]."""
    states, heads, size = _current(), layer.num_attention_heads, layer.head_dim
    states.begin_layer(layer.layer_idx)
    qkv = layer.act_fn(layer.qkv_proj(hidden_states)).view(-1, heads, 3 * size)
    query, key, value = qkv.split(size, dim=-1)
    decay = -layer.slope_rate.float().view(1, heads).expand(len(qkv), heads)
    # The operation divides queries by the root of their size, and this layer does not.
    attended = states.gated_delta_rule(query, key, value, decay, None, normalize=False) * size**0.5
    normed = layer.norm(attended.reshape(1, len(qkv), heads * size))
    return layer.out_proj(layer.output_gate(hidden_states).sigmoid() * normed), None


_LAYERS: dict[str, Callable[..., Any]] = {"MiniMaxLightningAttention": _attend_lightning}
"""Replacements of whole layers, by class."""
_TOKEN_BY_TOKEN = ("ZayaCCAProjection",)
"""Classes of layers whose own code is correct for one token at a time."""


def has_states(network_class: Any) -> bool:
    """Whether the code of a network, or of a part, has layers whose states are supported."""
    module = vars(sys.modules[network_class.__module__])
    return any(name in module for name in (*_FUNCTIONS, *_LAYERS, *_TOKEN_BY_TOKEN))


def replace_states(network: nn.Module) -> None:
    """Replace the functions and layers of a network's code that have states."""
    for module in network.modules():
        code = sys.modules[type(module).__module__]
        for name, ours in _FUNCTIONS.items():
            theirs = vars(code).get(name)
            if theirs is not None and not hasattr(theirs, _OURS):
                setattr(code, name, _dispatching(theirs, ours))
        if (replacement := _LAYERS.get(type(module).__name__)) is not None:
            module.forward = partial(replacement, module)
        elif type(module).__name__ in _TOKEN_BY_TOKEN:
            module.forward = partial(_compute_token_by_token, module.forward)


def _dispatching(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    known = signature(ours).parameters.keys()

    @wraps(theirs)
    def call(*arguments: Any, **options: Any) -> Any:
        if _states.get() is None:
            return theirs(*arguments, **options)
        given = {name: value for name, value in options.items() if value is not None and name not in _WITHOUT_EFFECT}
        if unknown := given.keys() - known:
            raise ValueError(f"its code passes {min(unknown)} to {theirs.__name__}, which is not supported")
        return ours(*arguments, **given)

    setattr(call, _OURS, True)
    return call


def _compute_token_by_token(forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The layer's outputs, [1, num_tokens, ...], or a tuple of them and of states."""
    caches = [one for one in (*arguments, *options.values()) if isinstance(one, StateCache)]
    assert caches
    hidden = options.get("hidden_states", arguments[0] if arguments else None)
    assert isinstance(hidden, Tensor)
    found = []
    for row, of_sequence in _current().tokens():
        given = {id(hidden): hidden[:, row : row + 1], id(caches[0]): _TokenCache(of_sequence)}
        positional = [given.get(id(one), one) for one in arguments]
        found.append(forward(*positional, **{name: given.get(id(one), one) for name, one in options.items()}))
    if isinstance(found[0], Tensor):
        return torch.cat(found, dim=1)
    return tuple(torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
