"""A native decoder's sizes, and switches for all differences between families."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from kernels.linear.experts import Routing
from kernels.ops import ClampedSwiglu
from worker_service.models.causal_model import widest
from worker_service.models.config.rope import Rope
from worker_service.models.layer_needs import LayerKeys, LayerNeeds
from worker_service.models.layers.mixers import Mixer


@dataclass(frozen=True)
class MixtureNames:
    """Names in a checkpoint: of router and experts after the layer's prefix, of projections after the expert's."""

    router: str
    experts: str
    """The part of a name before the expert's number."""
    gate: str
    up: str | None
    """None if `gate` is one tensor of gate and up, or there are no gates and `gate` is up."""
    down: str

    @property
    def gate_up(self) -> tuple[str, ...]:
        return (self.gate,) if self.up is None else (self.gate, self.up)


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts. Raises ValueError if `num_chosen` exceeds `num_experts`."""

    num_experts: int
    num_chosen: int
    """Experts for each token."""
    intermediate_size: int
    """Inner units of one expert."""
    renormalise: bool
    """Whether the router's weights for a token's experts are divided by their sum."""
    names: MixtureNames
    routing: Routing | None = None
    """DeepSeek's choice of experts, by groups; None: the experts with the largest logits."""
    shared_size: int = 0
    """Inner units of the shared experts, which all tokens use, together; 0 without shared experts."""
    biased: bool = False
    """Whether router and experts have biases."""
    activation: ClampedSwiglu | None = None
    """The experts'; None for the decoder's."""
    shared_gate: bool = False
    """Whether each token multiplies the shared experts' output by a sigmoid (Qwen3-Next)."""
    latent_size: int | None = None
    """Elements of the experts' inputs and outputs, which projections connect with the hidden state (Nemotron-H); None
    if experts compute hidden states."""
    beside_dense: bool = False
    """Whether a dense network computes beside the experts, and each expert has a scale (Gemma 4). See
    `MlpBesideExperts`."""
    scales_inputs: bool = False
    """Whether the router's weights multiply the experts' inputs, and not their outputs (Llama 4)."""

    def __post_init__(self) -> None:
        if self.num_chosen > self.num_experts:
            raise ValueError(f"num_experts_per_tok is {self.num_chosen}, and there are {self.num_experts} experts")

    @property
    def alternates(self) -> bool:
        """Whether outputs of gate and up alternate where they are one tensor. Otherwise all of gate come first."""
        return isinstance(self.activation, ClampedSwiglu)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI, 2024). A token has one vector for all heads, the latent, from which
    each head's key and value are computed; the rotated elements of the key are beside it. Raises ValueError."""

    rank: int
    """Elements of the latent (kv_lora_rank)."""
    query_rank: int | None
    """Elements of a query's own latent (q_lora_rank), or None."""
    plain_dim: int
    """Elements of a head's query that are not rotated (qk_nope_head_dim)."""
    rotary_dim: int
    """Elements of a head's query that are rotated (qk_rope_head_dim)."""
    value_dim: int
    """Elements of a head's value (v_head_dim)."""
    interleaved: bool
    """Whether rotated pairs are neighbours, and not in the two halves."""

    def __post_init__(self) -> None:
        if self.rotary_dim % 2:
            raise ValueError(f"qk_rope_head_dim is {self.rotary_dim}; it must be even")

    @property
    def query_dim(self) -> int:
        """Elements of a head's query."""
        return self.plain_dim + self.rotary_dim

    @property
    def key_dim(self) -> int:
        """Elements that the KV cache stores for a token and layer."""
        return self.rank + self.rotary_dim


@dataclass(frozen=True)
class Temperature:
    """Factors on queries that grow with the logarithm of their positions (Nakanishi, 2025)."""

    step: int
    """Positions with equal factors."""
    growth: float
    first: int = 1
    """The number by which the first position counts."""

    def factors(self, positions: Tensor) -> Tensor:
        """positions: [num_tokens] int64. Returns [num_tokens, 1] float32. In float64, the last elements of a tensor,
        which torch computes by other instructions, round to the same bits."""
        steps = ((positions + self.first) // self.step).double()
        return (steps.log1p() * self.growth + 1.0).float()[:, None]


@dataclass(frozen=True)
class PerLayerInputs:
    """Embeddings of tokens that each layer has for itself, beside the network's (Gemma 4)."""

    vocabulary_size: int
    size: int
    """Elements of a token's embedding for one layer."""


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a layer in a network whose layers differ. See `DecoderConfig`."""

    num_kv_heads: int
    head_dim: int
    intermediate_size: int


@dataclass(frozen=True)
class LayerConfig:
    rope: Rope | None
    """None without rotary embeddings."""
    window: int | None
    """Tokens that a token attends to, including itself; None for all earlier tokens."""
    mixture: Mixture | None = None
    """None for a dense layer. All mixtures of a network are equal."""
    mixer: Mixer | None = None
    """None for attention. Layers with a mixer keep states in place of keys and values."""
    chunked: bool = False
    """Whether a token attends to its own chunk of `window` tokens, in place of the last `window` tokens."""
    temperature: Temperature | None = None
    attends: bool = True
    """Whether the layer has a first half: attention or a mixer."""
    has_mlp: bool = True
    """Whether the layer has a second half."""
    sizes: LayerSizes | None = None
    """None for the network's sizes."""
    reads: int | None = None
    """The number of the earlier layer whose keys and values the layer reads; None if it has its own."""
    key_is_value: bool = False
    """Whether the projection of the key is also that of the value."""


QkNorm = Literal["head", "all", "plain"]
"""How queries and keys are normalised before rotary embeddings.

    `head`   each head, with weights.
    `all`    all heads of a token together, with weights.
    `plain`  each head, without weights, and only in layers with rotary embeddings.
"""


@dataclass(frozen=True)
class DecoderConfig:
    """Raises ValueError if sizes contradict each other."""

    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    activation: str
    """A function of `gated_activation`; without gates "relu2", the square of a ReLU."""
    layers: tuple[LayerConfig, ...]
    tied_embeddings: bool
    attention_scale: float
    """Factor on products of queries and keys, before the softmax."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm | None = None
    interleaved: bool = False
    """Whether rotated pairs are neighbours, and not in the two halves of a head. Latents: see `Latent`."""
    pre_norms: bool = True
    """Whether the inputs of both halves are normalised."""
    post_norms: bool = False
    """Whether the outputs of both halves are normalised."""
    gated_attention: bool = False
    """Whether each query head has a gate beside its query: a sigmoid for each element of its output (Qwen3-Next)."""
    value_norm: bool = False
    """Whether each head's value is normalised, without weights."""
    per_layer: PerLayerInputs | None = None
    layer_scales: bool = False
    """Whether each layer multiplies the residual stream by a number."""
    sinks: bool = False
    """Whether each query head has a sink, see `paged_attention`."""
    norm_offset: float = 0.0
    """Number to add to all norms' weights."""
    embedding_scale: float = 1.0
    scales_given: bool = False
    """Whether embeddings that requests give are scaled, too (Granite; in Gemma, only those of tokens)."""
    residual_scale: float = 1.0
    """Factor on the outputs of both halves of a layer."""
    logit_divisor: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    fused_checkpoint: bool = False
    """Whether query, key and value are one tensor in the checkpoint, and gate and up another."""
    gated_mlp: bool = True
    """Whether dense networks and experts have gates. Otherwise they are `down(activation(up(x)))`."""
    fused_gate_up: bool = False
    """Whether gate and up of dense networks and shared experts are one tensor in the checkpoint."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Names in the checkpoint that are not Llama's: the beginning of Llama's, and of this family's. Names in layers
    are without the layer's prefix."""
    latent: Latent | None = None
    """None without latent attention. Otherwise num_kv_heads is 1 and head_dim is `latent.key_dim`."""
    ignored_tensors: tuple[str, ...] = ()
    causal_without_window: bool = False
    """Whether tokens of an image attend to later tokens of the image only in layers with a window (Gemma 4)."""
    padded_tokens: frozenset[int] = frozenset()
    """Tokens in whose place the network reads `padding_token`."""
    padding_token: int = 0

    def __post_init__(self) -> None:
        turning = [
            2 * len(layer.rope.inverse_frequencies)
            for layer in self.layers
            if layer.rope is not None and layer.sizes is None
        ]
        if max(turning, default=0) > self.head_dim:
            raise ValueError(
                f"rotary embeddings would rotate {max(turning)} elements of each head, and head_dim is {self.head_dim}"
            )
        if self.latent is None and self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; it must be even")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_heads}, and num_key_value_heads {self.num_kv_heads}, which must "
                "divide it"
            )

    def of_layer(self, layer: LayerConfig) -> "DecoderConfig":
        """The sizes and switches of a layer: a network of that layer alone if it has sizes of its own. Raises
        ValueError."""
        if layer.sizes is None:
            return self
        return replace(self, layers=(replace(layer, sizes=None),), **vars(layer.sizes))

    @property
    def _stored(self) -> list[LayerConfig]:
        """The layers in the cache."""
        return [layer for layer in self.layers if layer.attends and layer.reads is None]

    @property
    def num_layers(self) -> int:
        return len(self._stored)

    @property
    def kv_parts(self) -> int:
        return 2 if self.latent is None else 1

    @property
    def value_dim(self) -> int:
        """Elements of a head's output."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def tied(self) -> Mapping[str, str]:
        return {"lm_head.weight": self.embedding_name} if self.tied_embeddings else {}

    def untied(self, own: frozenset[str]) -> "DecoderConfig":
        return replace(self, tied_embeddings=False) if own else self

    @property
    def layer_needs(self) -> tuple[LayerNeeds, ...]:
        """The needs of each layer in the cache, if some layers have states or sizes of their own; otherwise (). See
        `needs_of`."""
        if all(layer.mixer is None and layer.sizes is None for layer in self._stored):
            return ()
        return tuple(
            LayerKeys(own.num_kv_heads, own.head_dim, own.kv_parts, layer.window, layer.chunked)
            if layer.mixer is None
            else layer.mixer.needs
            for layer, own in ((layer, self.of_layer(layer)) for layer in self._stored)
        )

    @property
    def embedding_name(self) -> str:
        return self.name("model.embed_tokens.weight")

    def name(self, llamas: str) -> str:
        """A tensor's name in the checkpoint."""
        found = (theirs + llamas[len(ours) :] for ours, theirs in self.renamed if llamas.startswith(ours))
        return next(found, llamas)

    @property
    def mixture(self) -> Mixture | None:
        """None if all layers are dense."""
        return next((layer.mixture for layer in self.layers if layer.mixture is not None), None)

    @property
    def sliding_window(self) -> int | None:
        return widest(self.windows)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(layer.window for layer in self._stored)

    @property
    def chunks(self) -> tuple[bool, ...]:
        """Whether each layer's window is a chunk."""
        return tuple(layer.chunked for layer in self._stored)
