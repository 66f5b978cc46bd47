"""MiMo's drafting head for multi-token prediction (MTP): one decoder layer, trained together with the model.

The layer (Xiaomi LLM-Core Team, 2025; method: DeepSeek-AI, 2024) reads a token's embedding and the model's final state
of the previous token; the model's head computes logits. Of several MTP layers, each trained for one distance, the first
drafts for all distances.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.backends import ops_for
from kernels.inputs import AttentionMetadata
from kernels.ops import Ops
from worker_service.models.decoders.decoder import Decoder
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.decoders.head_layer import HeadLayer
from worker_service.models.layers.linear import Linear

NAME = "model.mtp_layers.0"
"""Name in a checkpoint."""


class MtpHead:
    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate weights unfilled. config: the model's."""
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
        tensors = self._layer.checkpoint_tensors() | {
            "token_layernorm.weight": self._token_norm,
            "hidden_layernorm.weight": self._state_norm,
            "input_layernorm.weight": self._attention_norm,
            "final_layernorm.weight": self._norm,
            "input_proj.weight": self._input.weight,
        }
        return {f"{NAME}.{name}": tensor for name, tensor in tensors.items()}

    def pack(self, target: Decoder) -> None:
        """Called once, after the tensors of `checkpoint_tensors` have been filled. target: the model."""
        self._layer.pack()
        self._input.pack()
        self._target = target

    def read(self, states: Sequence[Tensor], slots: Tensor, cache: Tensor) -> None:
        self.keep(states[0], slots, cache)

    def keep(self, states: Tensor, slots: Tensor, cache: Tensor) -> None:
        self._layer.keep(states, slots, cache)

    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, attention: AttentionMetadata, cache: Tensor
    ) -> Tensor:
        """See `Head.forward`. States are normalised, like the model's final hidden states."""
        assert self._target is not None
        ops, eps = self._ops, self._eps
        # The second token's embedding is zeros, as in training.
        embedded = self._target.embedding(token_ids).masked_fill((positions == 0).unsqueeze(1), 0)
        normed = ops.rms_norm(self._layer.kept(slots, cache), self._state_norm, eps)
        residual = self._input(torch.cat([normed, ops.rms_norm(embedded, self._token_norm, eps)], dim=1)).float()
        x = ops.rms_norm(residual, self._attention_norm, eps)
        self._layer.forward(x, residual, positions, slots, attention, cache)
        return ops.rms_norm(residual, self._norm, eps)

    def compute_logits(self, states: Tensor) -> Tensor:
        assert self._target is not None
        return self._target.compute_logits(states)
