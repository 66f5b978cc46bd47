"""EAGLE-3's drafting head: one decoder layer over a token's embedding and the previous token's state (Li et al., 2025).
If the previous token is no draft, its state is a linear function of the target's hidden states at three depths."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.backends import ops_for
from kernels.inputs import AttentionMetadata
from kernels.ops import Ops
from worker_service.models.decoders.eagle_config import EagleConfig
from worker_service.models.decoders.head_layer import HeadLayer
from worker_service.models.layers.linear import Linear


class EagleHead:
    def __init__(self, config: EagleConfig, dtype: torch.dtype, device: torch.device, *, has_embedding: bool) -> None:
        """Allocate weights unfilled. has_embedding: false if the head uses the target's embedding."""
        self.states_before = config.states_before
        self._config = config
        self._ops: Ops = ops_for(device)
        hidden = config.layer.hidden_size

        def allocate(outputs: int, inputs: int, *, wide: bool = False) -> Linear:
            return Linear.allocate(outputs, inputs, False, dtype, device, wide=wide)

        self._layer = HeadLayer(config.layer, 2 * hidden, dtype, device)
        self._embedding_norm, self._state_norm, self._norm = torch.empty(3, hidden, dtype=dtype, device=device)
        self._fc = allocate(hidden, 3 * config.target_hidden_size)
        self._lm_head = allocate(config.draft_vocabulary_size, hidden, wide=True)
        self._table = None
        if has_embedding:
            self._table = torch.empty(config.layer.vocabulary_size, hidden, dtype=dtype, device=device)
        self._embedding: Callable[[Tensor], Tensor] = self._look_up
        self._token_ids: Tensor | None = None

    def checkpoint_tensors(self, layer: str) -> dict[str, Tensor]:
        """layer: the layer's name in the checkpoint."""
        tensors = self._layer.checkpoint_tensors() | {
            "hidden_norm.weight": self._state_norm,
            "input_layernorm.weight": self._embedding_norm,
        }
        whole = {f"{layer}.{name}": tensor for name, tensor in tensors.items()}
        whole |= {"norm.weight": self._norm, "fc.weight": self._fc.weight, "lm_head.weight": self._lm_head.weight}
        if self._table is not None:
            whole["embed_tokens.weight"] = self._table
        return whole

    def pack(self, token_ids: Tensor | None, embedding: Callable[[Tensor], Tensor]) -> None:
        """Called once, after the tensors of `checkpoint_tensors` have been filled. token_ids: [draft_vocabulary_size]
        int64, the token of each logit; None if logit i is for token i. embedding: the target's, see
        `Decoder.embedding`."""
        if self._table is None:
            self._embedding = embedding
        self._layer.pack()
        self._fc.pack()
        self._lm_head.pack()
        self._token_ids = token_ids

    def _look_up(self, token_ids: Tensor) -> Tensor:
        assert self._table is not None
        return functional.embedding(token_ids, self._table).float()

    def read(self, states: Sequence[Tensor], slots: Tensor, cache: Tensor) -> None:
        self.keep(self._fc(torch.cat(list(states), dim=1)), slots, cache)

    def keep(self, states: Tensor, slots: Tensor, cache: Tensor) -> None:
        self._layer.keep(states, slots, cache)

    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, attention: AttentionMetadata, cache: Tensor
    ) -> Tensor:
        """See `Head.forward`. States are not normalised by the last norm."""
        ops, eps = self._ops, self._config.layer.rms_norm_eps
        residual = self._layer.kept(slots, cache)
        normed = ops.rms_norm(residual, self._state_norm, eps)
        if self._config.norm_before_residual:
            residual = normed.float()
        x = torch.cat([ops.rms_norm(self._embedding(token_ids), self._embedding_norm, eps), normed], dim=1)
        self._layer.forward(x, residual, positions, slots, attention, cache)
        return residual

    def compute_logits(self, states: Tensor) -> Tensor:
        layer = self._config.layer
        logits = self._lm_head(self._ops.rms_norm(states, self._norm, layer.rms_norm_eps))
        if self._token_ids is None:
            return logits
        whole = logits.new_full((len(logits), layer.vocabulary_size), -torch.inf)
        return whole.index_copy_(1, self._token_ids, logits)
