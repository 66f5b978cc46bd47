"""The configuration of a native decoder: its sizes, and the switches for all differences between native model
families."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from worker_service.models.causal_model import widest
from worker_service.models.config.rope import Rope


@dataclass(frozen=True)
class MixtureNames:
    """Names of the parts of a mixture of experts in a checkpoint. The names of router and experts follow the layer's
    prefix. The names of gate, up and down projection follow the expert's prefix."""

    router: str
    experts: str
    """The part of a tensor's name before the expert's number."""
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts. The experts are feed-forward networks, and each token uses some of the experts.

    Raises ValueError if `num_chosen` exceeds `num_experts`.
    """

    num_experts: int
    num_chosen: int
    """Number of experts that each token uses."""
    intermediate_size: int
    """Number of inner units of one expert."""
    renormalise: bool
    """Whether the router's weights for a token's experts are divided by their sum."""
    names: MixtureNames

    def __post_init__(self) -> None:
        if self.num_chosen > self.num_experts:
            raise ValueError(f"num_experts_per_tok is {self.num_chosen}, and there are {self.num_experts} experts")


@dataclass(frozen=True)
class LayerConfig:
    """The settings of one decoder layer. The layers of a network may have different settings."""

    rope: Rope | None
    """The rotary embedding of queries and keys; None for a layer without rotary embeddings."""
    window: int | None
    """The size of the sliding window in tokens, including the query token itself; None if a token attends to all
    earlier tokens."""
    mixture: Mixture | None = None
    """The layer's mixture of experts; None for a dense layer. All layers with a mixture have equal mixtures."""


@dataclass(frozen=True)
class DecoderConfig:
    """The configuration of a native decoder. Raises ValueError if its sizes contradict each other."""

    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    activation: str
    """Name of an activation function that the operation `gated_activation` supports."""
    layers: tuple[LayerConfig, ...]
    tied_embeddings: bool
    attention_scale: float
    """Factor by which the products of queries and keys are multiplied before the softmax."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head's queries and keys are normalised before rotary embeddings are applied."""
    post_norms: bool = False
    """Whether the output of each half of a layer is normalised, in addition to the half's input."""
    norm_offset: float = 0.0
    """Number that is added to the weights of all norms when they are applied."""
    embedding_scale: float = 1.0
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    fused_checkpoint: bool = False
    """Whether the checkpoint stores the query, key and value projections as one tensor, and the gate and up projections
    as one tensor."""

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
        """Number of layers whose keys and values are in the KV cache."""
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
        """The network's mixture of experts; None if all layers are dense."""
        return next((layer.mixture for layer in self.layers if layer.mixture is not None), None)

    @property
    def sliding_window(self) -> int | None:
        """The largest sliding window of all layers, in tokens; None if a layer has no window."""
        return widest(layer.window for layer in self.layers)
