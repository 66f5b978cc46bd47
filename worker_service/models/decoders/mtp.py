"""The head of multi-token prediction that MiMo's checkpoints have: a layer that was trained beside the model itself.

For a token it takes the token's embedding and the model's last state of the token before it, and has the model's own
head make logits. (Xiaomi LLM-Core Team, 2025; the idea in this form: DeepSeek-AI, 2024.) Files with several such layers
have been trained for drafts further ahead; the first is used for all of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention.metadata import AttentionMetadata
from kernels.backends import ops_for
from kernels.ops import Ops
from worker_service.models.decoders.decoder import Decoder
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.decoders.head_layer import HeadLayer
from worker_service.models.layers.linear import Linear

NAME = "model.mtp_layers.0"
"""Of the layer in a checkpoint."""


class MtpHead:
    """A `Head`."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the weights, without values yet. config: the model's."""
        self.states_before = (config.num_layers + 1,)
        self._eps = config.rms_norm_eps
        self._ops: Ops = ops_for(device)
        hidden = config.hidden_size
        self._layer = HeadLayer(config, hidden, dtype, device)
        norms = torch.empty(4, hidden, dtype=dtype, device=device)
        self._token_norm, self._state_norm, self._attention_norm, self._norm = norms
        self._input = Linear.allocate(hidden, 2 * hidden, False, dtype, device, wide=self._ops.WIDE_PRODUCTS)
        self._target: Decoder | None = None

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """As `Loadable` has it."""
        tensors = self._layer.checkpoint_tensors() | {
            "token_layernorm.weight": self._token_norm,
            "hidden_layernorm.weight": self._state_norm,
            "input_layernorm.weight": self._attention_norm,
            "final_layernorm.weight": self._norm,
            "input_proj.weight": self._input.weight,
        }
        return {f"{NAME}.{name}": tensor for name, tensor in tensors.items()}

    def pack(self, target: Decoder) -> None:
        """Prepare the weights for use. Called once, when `checkpoint_tensors` have been filled."""
        self._layer.pack()
        self._input.pack()
        self._target = target

    def read(self, states: Sequence[Tensor], slots: Tensor, cache: Tensor) -> None:
        """As `Head` has it."""
        self.keep(states[0], slots, cache)

    def keep(self, states: Tensor, slots: Tensor, cache: Tensor) -> None:
        """As `Head` has it."""
        self._layer.keep(states, slots, cache)

    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, attention: AttentionMetadata, cache: Tensor
    ) -> Tensor:
        """As `Head` has it; the states are normalised, as the model's are."""
        assert self._target is not None
        ops, eps = self._ops, self._eps
        # It was trained without the embedding that follows the first state.
        embedded = self._target.embedding(token_ids).masked_fill((positions == 0).unsqueeze(1), 0)
        normed = ops.rms_norm(self._layer.kept(slots, cache), self._state_norm, eps)
        residual = self._input(torch.cat([normed, ops.rms_norm(embedded, self._token_norm, eps)], dim=1)).float()
        x = ops.rms_norm(residual, self._attention_norm, eps)
        self._layer.forward(x, residual, positions, slots, attention, cache)
        return ops.rms_norm(residual, self._norm, eps)

    def compute_logits(self, states: Tensor) -> Tensor:
        """As `Head` has it."""
        assert self._target is not None
        return self._target.compute_logits(states)
