"""Sizes and switches of a native decoder: all differences between families of networks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from worker_service.models.causal_model import widest
from worker_service.models.config.rope import Rope


@dataclass(frozen=True)
class MixtureNames:
    """Names of a mixture's parts in a checkpoint: router and experts within a layer; gate, up and down within an
    expert."""

    router: str
    experts: str
    """Prefix of an expert's number."""
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Mixture:
    """A mixture of feed-forward networks, the experts; each token uses some of them.

    Raises ValueError if a token would use more experts than there are.
    """

    num_experts: int
    num_chosen: int
    """Experts for each token."""
    intermediate_size: int
    """Inner units of one expert."""
    renormalise: bool
    """Whether the weights of a token's experts are divided by their sum."""
    names: MixtureNames

    def __post_init__(self) -> None:
        if self.num_chosen > self.num_experts:
            raise ValueError(f"num_experts_per_tok is {self.num_chosen}, and there are {self.num_experts} experts")


@dataclass(frozen=True)
class LayerConfig:
    """Settings that may differ from layer to layer."""

    rope: Rope | None
    """Rotation of queries and keys; None for a layer without positions."""
    window: int | None
    """Tokens to which a token attends at most, itself included; None for all."""
    mixture: Mixture | None = None
    """The mixture, equal in all layers that have one; None for a dense layer."""


@dataclass(frozen=True)
class DecoderConfig:
    """A network. Raises ValueError if its sizes contradict each other."""

    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    activation: str
    """One of the activations of `gated_activation`."""
    layers: tuple[LayerConfig, ...]
    tied_embeddings: bool
    attention_scale: float
    """Factor on the products of queries and keys."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head's queries and keys are normalised before they are rotated."""
    post_norms: bool = False
    """Whether the output of each half of a layer is normalised, too."""
    norm_offset: float = 0.0
    """Added to the weights of all norms."""
    embedding_scale: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    fused_checkpoint: bool = False
    """Whether checkpoints hold query, key and value as one tensor, and gate and up as another."""

    def __post_init__(self) -> None:
        turning = [2 * len(layer.rope.inverse_frequencies) for layer in self.layers if layer.rope is not None]
        if max(turning, default=0) > self.head_dim:
            raise ValueError(f"{max(turning)} numbers of each head would turn, and head_dim is {self.head_dim}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; it must be even")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_heads}, and num_key_value_heads {self.num_kv_heads}, which must "
                "divide it"
            )

    ignored_tensors = ()
    """Same as `ModelConfig.ignored_tensors`."""

    @property
    def num_layers(self) -> int:
        """Layers whose keys and values the cache holds."""
        return len(self.layers)

    @property
    def tied(self) -> Mapping[str, str]:
        """Implements `ModelConfig.tied`."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.tied_embeddings else {}

    def untied(self, own: frozenset[str]) -> "DecoderConfig":
        """Implements `ModelConfig.untied`."""
        return replace(self, tied_embeddings=False) if own else self

    @property
    def mixture(self) -> Mixture | None:
        """The mixture of the layers that have one; None if all layers are dense."""
        return next((layer.mixture for layer in self.layers if layer.mixture is not None), None)

    @property
    def sliding_window(self) -> int | None:
        """Tokens to which a token attends at most, itself included, in any layer; None if some layer has no window."""
        return widest(layer.window for layer in self.layers)
