"""Sizes of the layers that keep states, which take the place of attention in a decoder layer."""

from dataclasses import dataclass

from worker_service.models.layer_needs import LayerStates, State

MAX_TAPS = 64
"""The most inputs of a convolution."""


@dataclass(frozen=True)
class ShortConvolution:
    """LFM2's short convolution between two gates (Liquid AI, 2025)."""

    channels: int
    taps: int
    """Inputs of the convolution: a token and those before it."""
    biased: bool
    """Whether the convolution and both projections have biases."""

    @property
    def needs(self) -> LayerStates:
        return LayerStates((State((self.channels, self.taps - 1), is_wide=False),))


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta networks (Yang et al., 2024). Raises ValueError if the heads do not fit."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    by_head: bool
    """Whether the checkpoint has two input projections, with outputs by key head (Qwen3-Next). Otherwise it has four
    (Qwen3.5)."""

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"linear_num_value_heads is {self.value_heads}, and linear_num_key_heads {self.key_heads}, which must "
                "divide it"
            )

    @property
    def keys(self) -> int:
        """Elements of all keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def needs(self) -> LayerStates:
        convolution = State((2 * self.keys + self.values, self.taps - 1), is_wide=False)
        return LayerStates((convolution, State((self.value_heads, self.key_dim, self.value_dim), is_wide=True)))


@dataclass(frozen=True)
class Mamba2:
    """The state space model of Mamba-2 (Dao and Gu, 2024). Raises ValueError if the heads do not fit."""

    heads: int
    head_dim: int
    columns: int
    """Numbers of a state for each element of a head."""
    groups: int
    """Groups of heads with B and C of their own."""
    taps: int
    convolution_bias: bool
    projection_bias: bool
    least_step: float = 0.0
    """Smaller steps are raised to it."""

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ValueError(f"Mamba-2 has {self.heads} heads; the number of groups, {self.groups}, must divide it")

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: those of the heads, of B and of C."""
        return self.inner + 2 * self.groups * self.columns

    @property
    def needs(self) -> LayerStates:
        convolution = State((self.convolved, self.taps - 1), is_wide=False)
        return LayerStates((convolution, State((self.heads, self.head_dim, self.columns), is_wide=True)))


Mixer = ShortConvolution | DeltaNet | Mamba2
