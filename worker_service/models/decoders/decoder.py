"""The native decoder: computes Llama's network, with the variants that `DecoderConfig` describes.

A decoder layer has two halves. The first half is attention, and the second half is a gated feed-forward network or a
mixture of experts. The input of each half is the normalised residual stream. The output of each half is added to the
residual stream.

The query, key and value projections are fused into one product. The gate and up projections are fused into one product,
too. Weights are allocated once, in their final places. `checkpoint_tensors` maps each tensor of a checkpoint to its
part of the allocated weights.

With tensor parallelism, each rank holds a `Shard` of the network: some of the attention heads, inner units and
vocabulary tokens. The output of each half of a layer, and the embeddings, are summed over the ranks. Each rank computes
the logits of its own vocabulary tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.attention.metadata import AttentionMetadata
from kernels.backends import ops_for
from kernels.float8 import Float8Weight
from kernels.ops import Ops
from kernels.reference import rotary_tables
from worker_service.models.causal_model import AdapterPlace, Fill
from worker_service.models.decoders.decoder_config import DecoderConfig, LayerConfig
from worker_service.models.decoders.embedding import Embedding
from worker_service.models.decoders.mlp import DenseMlp, MixtureMlp, Mlp, Projection
from worker_service.models.decoders.shard import Shard
from worker_service.models.layers.linear import NONE_QUANTIZED, Linear, Quantization, Quantized, head_quantization
from worker_service.parallel.ranks import ALONE, Ranks


class DecoderLayer:
    """A layer of the native decoder, with this rank's part of the weights."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: LayerConfig,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks,
        shard: Shard,
        ops: Ops,
        *,
        deferred: bool = False,
    ) -> None:
        self._config = config
        self._window = layer.window
        self._ops = ops
        self._ranks = ranks
        self._heads = [len(heads) * config.head_dim for heads in (shard.heads, shard.kv_heads, shard.kv_heads)]
        hidden = config.hidden_size
        self._attention_norm = torch.empty(hidden, dtype=dtype, device=device)
        self._mlp_norm = torch.empty(hidden, dtype=dtype, device=device)
        self._attention_post_norm, self._mlp_post_norm = (
            torch.empty(hidden, dtype=dtype, device=device) if config.post_norms else None for _ in range(2)
        )
        self._qk_norms: tuple[Tensor, Tensor] | None = None
        if config.qk_norm:
            query_norm, key_norm = torch.empty(2, config.head_dim, dtype=dtype, device=device)
            self._qk_norms = query_norm, key_norm
        allocate = partial(Linear.allocate, dtype=dtype, device=device, deferred=deferred, ops=ops)
        self._qkv = allocate(sum(self._heads), hidden, config.qkv_bias)
        wide, adds_bias = self._ops.WIDE_PRODUCTS, ranks.rank == 0
        self._out = allocate(hidden, self._heads[0], config.out_bias, wide=wide, adds_bias=adds_bias)
        self._mlp: Mlp
        if layer.mixture is None:
            inner = len(shard.inner)
            self._mlp = DenseMlp(config, inner, dtype, device, adds_bias=adds_bias, deferred=deferred, ops=ops)
        else:
            inner = len(shard.expert_inner)
            self._mlp = MixtureMlp(config, layer.mixture, inner, dtype, device, deferred=deferred, ops=ops)

    @property
    def projections(self) -> list[Projection]:
        """All linear layers of this decoder layer, with the names of their projections."""
        return self._attention_projections + self._mlp.projections

    @property
    def adapted(self) -> list[Projection]:
        """The linear layers of this decoder layer that can have adapters."""
        return self._attention_projections + self._mlp.adapted

    @property
    def _attention_projections(self) -> list[Projection]:
        config = self._config
        query, key, value = self._heads
        if config.fused_checkpoint:
            qkv = {"self_attn.qkv_proj": query + key + value}
        else:
            qkv = {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": value}
        return [(self._qkv, qkv), (self._out, {"self_attn.o_proj": config.hidden_size})]

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """This layer's tensors that must be filled from a checkpoint. The keys are the tensors' names without the
        layer's prefix."""
        tensors = {"input_layernorm.weight": self._attention_norm}
        for linear, names in self.projections:
            tensors |= linear.parts(names)
        if self._attention_post_norm is not None and self._mlp_post_norm is not None:
            tensors |= {
                "post_attention_layernorm.weight": self._attention_post_norm,
                "pre_feedforward_layernorm.weight": self._mlp_norm,
                "post_feedforward_layernorm.weight": self._mlp_post_norm,
            }
        else:
            tensors["post_attention_layernorm.weight"] = self._mlp_norm
        if self._qk_norms is not None:
            tensors |= dict(zip(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), self._qk_norms, strict=True))
        return tensors

    def forward(
        self,
        delta: Tensor | None,
        residual: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        layer_cache: Tensor,
        slots: Tensor,
        attention: AttentionMetadata,
        adapter_slots: Tensor | None,
    ) -> Tensor:
        """Compute the layer: add `delta` and the attention's output to `residual` in place, and return the output of
        the layer's second half.

        delta is [num_tokens, hidden_size], the return value of the previous layer, or None in the first layer. residual
        is [num_tokens, hidden_size] float32, the residual stream. rotation: cosines and sines from `rotary_tables`, or
        None in a layer without rotary embeddings. layer_cache, slots: see `store_kv`. adapter_slots: see `Linear`.
        """
        config, ops = self._config, self._ops
        eps, offset = config.rms_norm_eps, config.norm_offset
        if delta is None:
            x = ops.rms_norm(residual, self._attention_norm, eps, offset)
        else:
            x = ops.add_rms_norm(delta, residual, self._attention_norm, eps, offset)
        attended = ops.qkv_attention(
            self._qkv(x, adapter_slots),
            self._qk_norms,
            eps,
            offset,
            rotation,
            layer_cache,
            slots,
            attention,
            config.attention_scale,
            self._window,
            config.attention_soft_cap,
        )
        delta = self._ranks.all_reduce(self._out(attended, adapter_slots))
        if self._attention_post_norm is not None:
            delta = ops.rms_norm(delta, self._attention_post_norm, eps, offset, torch.float32)
        x = ops.add_rms_norm(delta, residual, self._mlp_norm, eps, offset)
        delta = self._ranks.all_reduce(self._mlp(x, adapter_slots))
        if self._mlp_post_norm is not None:
            delta = ops.rms_norm(delta, self._mlp_post_norm, eps, offset, torch.float32)
        return delta


class Decoder:
    """A native decoder, which computes logits from token ids. See the module's docstring."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ALONE,
        *,
        batch_invariant: bool = False,
        fill: Fill | None = None,
    ) -> None:
        """Allocate this rank's weights without filling them. batch_invariant: see `ops_for`.

        fill: function that copies checkpoint tensors to their places in memory. If `fill` is given, `pack` allocates
        the weight matrices of one layer at a time, and calls `fill` for the matrices that are needed in floating point.
        `pack` then also raises the errors that `fill` raises.
        """
        self.config = config
        self._ranks = ranks
        self._ops: Ops = ops_for(device, batch_invariant)
        shard = Shard.of(config, ranks.rank, ranks.size)
        num_rows = -(-config.vocabulary_size // ranks.size)  # the last rank may have rows without a token
        table = partial(torch.empty, num_rows, config.hidden_size, dtype=dtype, device=device)
        self._embedding = Embedding(table(), shard.vocabulary, ranks)
        self._layers = [
            DecoderLayer(config, layer, dtype, device, ranks, shard, self._ops, deferred=fill is not None)
            for layer in config.layers
        ]
        self._fill = fill
        self._norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        # The embedding scale is rounded to the dtype of the weights, because it had this dtype in training.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        # The table is not allocated with `empty_like`. On the meta device, `empty_like` makes torch import sympy, which
        # would take a fifth of the time that a worker needs to start.
        head = self._embedding.weight if config.tied_embeddings else table()
        self._lm_head = Linear(head, wide=True, ops=self._ops)
        ropes = {layer.rope for layer in config.layers if layer.rope is not None}
        self._frequencies = {rope: rope.inverse_frequencies.to(device) for rope in ropes}
        self._shown: tuple[int, ...] = ()
        self._show: Callable[[Sequence[Tensor], Tensor], None] | None = None

    @property
    def embedding(self) -> Callable[[Tensor], Tensor]:
        """The network's embedding, a function from token ids, [num_tokens] int64, to embeddings, [num_tokens,
        hidden_size] float32."""
        return self._embedding

    def show_states(self, before: Sequence[int], show: Callable[[Sequence[Tensor], Tensor], None]) -> None:
        """Register the function `show` for a drafting head. Each forward pass calls `show` with the hidden states
        before the layers in `before`, and with the tokens' slots.

        The hidden states before a layer are [num_tokens, hidden_size], in the dtype of the weights. In `before`, the
        number num_layers stands for the hidden states after the last layer, and num_layers + 1 for the hidden states
        after the network's last norm.
        """
        self._shown, self._show = tuple(before), show

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Implements `CausalModel.checkpoint_tensors`."""
        embedding = self._embedding.own_rows(self._embedding.weight)
        tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": self._norm}
        if not self.config.tied_embeddings:
            tensors["lm_head.weight"] = self._embedding.own_rows(self._lm_head.weight)
        for number, layer in enumerate(self._layers):
            tensors |= {f"model.layers.{number}.{name}": part for name, part in layer.checkpoint_tensors().items()}
        return tensors

    def pack(self, quantization: Quantization = "none", quantized: Quantized = NONE_QUANTIZED) -> None:
        """Implements `CausalModel.pack`."""
        head = self._lm_head.weight
        name = "model.embed_tokens.weight" if self.config.tied_embeddings else "lm_head.weight"
        if isinstance(quantized.get("model.embed_tokens.weight"), Float8Weight):
            raise ValueError("model.embed_tokens.weight is stored in fp8; only weights of linear layers are read so")
        if (found := quantized.get(name)) is not None:
            self._lm_head.pack_parts([found], [len(head)])
        else:
            self._lm_head.pack(head_quantization(head.device, head.dtype, quantization))
        if self.config.tied_embeddings:
            self._embedding.take_rows_of(self._lm_head)
        elif (found := quantized.get("model.embed_tokens.weight")) is not None:
            rows = Linear(self._embedding.weight)
            rows.pack_parts([found], [len(head)])
            self._embedding.take_rows_of(rows)
        for number, layer in enumerate(self._layers):
            _pack_layer(layer, f"model.layers.{number}", quantization, quantized, self._fill)

    def allocate_adapters(self, num_slots: int, max_rank: int) -> dict[str, AdapterPlace]:
        """Implements `CausalModel.allocate_adapters`."""
        places: dict[str, AdapterPlace] = {}
        for number, layer in enumerate(self._layers):
            for linear, names in layer.adapted:
                weights = linear.allocate_adapters(list(names.values()), num_slots, max_rank)
                for part, name in enumerate(names):
                    places[f"model.layers.{number}.{name}"] = AdapterPlace(weights, part)
        return places

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        attention: AttentionMetadata,
        cache: Tensor,
        adapter_slots: Tensor | None = None,
    ) -> Tensor:
        """Implements `CausalModel.forward`. The returned hidden states are normalised by the network's last norm."""
        rotations = {
            rope: rotary_tables(positions, frequencies, rope.scale) for rope, frequencies in self._frequencies.items()
        }
        residual, delta = self._embedding(token_ids), None
        if self._embedding_scale != 1:
            residual *= self._embedding_scale
        states: dict[int, Tensor] = {}
        for number, (layer, layer_config) in enumerate(zip(self._layers, self.config.layers, strict=True)):
            if number in self._shown:
                states[number] = (residual.clone() if delta is None else residual + delta).to(self._norm.dtype)
            rotation = rotations[layer_config.rope] if layer_config.rope is not None else None
            delta = layer.forward(delta, residual, rotation, cache[:, number], slots, attention, adapter_slots)
        assert delta is not None  # every network has at least one layer
        normed = self._ops.add_rms_norm(delta, residual, self._norm, self.config.rms_norm_eps, self.config.norm_offset)
        if self._show is not None:
            behind = {len(self._layers): residual, len(self._layers) + 1: normed}
            shown = [(states | behind)[number].to(normed.dtype) for number in self._shown]
            self._show(shown, slots)
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Implements `CausalModel.compute_logits`."""
        logits, cap = self._lm_head(hidden), self.config.logit_soft_cap
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        # Every rank receives the logits of all ranks, so that all ranks sample the same tokens without further
        # communication.
        return self._ranks.all_gather(logits)[:, : self.config.vocabulary_size].contiguous()


def _pack_layer(
    layer: DecoderLayer, name: str, quantization: Quantization, quantized: Quantized, fill: Fill | None
) -> None:
    """Pack the weights of a decoder layer. If a weight was on the meta device, its floating-point values occupy memory
    only during this call."""
    projections = [
        (linear, {f"{name}.{part}": size for part, size in parts.items()}) for linear, parts in layer.projections
    ]
    if fill is not None:
        fill(_materialised(projections, quantization, quantized))  # no reference to the weights is kept here
    for linear, parts in projections:
        weights = [quantized.get(f"{part}.weight") for part in parts]
        if any(weight is not None for weight in weights):
            linear.pack_parts(weights, list(parts.values()))
        else:
            linear.pack(quantization)


def _materialised(
    projections: Sequence[Projection], quantization: Quantization, quantized: Quantized
) -> dict[str, Tensor]:
    """Allocate those weights that are still on the meta device and are needed in floating point. Returns the allocated
    tensors by name."""
    places: dict[str, Tensor] = {}
    for linear, parts in projections:
        needed = [f"{part}.weight" for part in parts if f"{part}.weight" not in quantized]
        if needed and linear.materialise(quantization):
            found = linear.parts(parts)
            places |= {name: found[name] for name in needed}
    return places
