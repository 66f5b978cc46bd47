"""The sizes and switches of a native decoder: everything that sets one family of networks apart from another."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from worker_service.models.causal_model import widest
from worker_service.models.config.rope import Rope


@dataclass(frozen=True)
class MixtureNames:
    """What a checkpoint calls the parts of a mixture, within a layer and within an expert."""

    router: str
    experts: str
    """Behind it is an expert's number."""
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Mixture:
    """A feed-forward network of several, the experts, of which each token has some. Raises ValueError where the sizes
    make none."""

    num_experts: int
    num_chosen: int
    """Of them, for each token."""
    intermediate_size: int
    """Of one expert."""
    renormalise: bool
    """Whether the weights of the chosen ones are divided by their sum."""
    names: MixtureNames

    def __post_init__(self) -> None:
        if self.num_chosen > self.num_experts:
            raise ValueError(f"num_experts_per_tok is {self.num_chosen}, and there are {self.num_experts} experts")


@dataclass(frozen=True)
class LayerConfig:
    """Settings that may differ from layer to layer."""

    rope: Rope | None
    """None in a layer that uses no positions."""
    window: int | None
    """How many tokens up to itself a token attends to; None for all."""
    mixture: Mixture | None = None
    """None in a layer with one feed-forward network. All layers that have one have the same."""


@dataclass(frozen=True)
class DecoderConfig:
    """A network. Raises ValueError where the sizes make none."""

    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    activation: str
    """One of `gated_activation`'s activations."""
    layers: tuple[LayerConfig, ...]
    tied_embeddings: bool
    attention_scale: float
    """The factor on the products of queries and keys."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head's queries and keys are normalised before they are rotated."""
    post_norms: bool = False
    """Whether what a half of a layer adds is normalised as well."""
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
    """As `ModelConfig` has it."""

    @property
    def num_layers(self) -> int:
        """How many layers the cache has to hold keys and values of."""
        return len(self.layers)

    @property
    def tied(self) -> Mapping[str, str]:
        """As `ModelConfig` has it."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.tied_embeddings else {}

    def untied(self, own: frozenset[str]) -> "DecoderConfig":
        """As `ModelConfig` has it."""
        return replace(self, tied_embeddings=False) if own else self

    @property
    def mixture(self) -> Mixture | None:
        """That of the layers that have one."""
        return next((layer.mixture for layer in self.layers if layer.mixture is not None), None)

    @property
    def sliding_window(self) -> int | None:
        """How many tokens up to itself a token attends to, whatever the layer; None for all."""
        return widest(layer.window for layer in self.layers)
