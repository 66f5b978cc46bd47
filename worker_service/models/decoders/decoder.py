"""The native decoder: Llama's network, with the variants of `DecoderConfig`.

A rank holds a `Shard`; halves of layers and embeddings are summed over the ranks, and each rank computes the logits of
its own tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kernels.backends import ops_for
from kernels.float8 import Float8Weight
from kernels.inputs import rotary_tables
from kernels.ops import Ops
from worker_service.models.causal_model import (
    AdapterPlace,
    Attention,
    Cache,
    Fill,
    GivenEmbeddings,
    LayerPlace,
    Slots,
    by_layer,
)
from worker_service.models.config.rope import Rope
from worker_service.models.decoders.attention import ByPosition
from worker_service.models.decoders.decoder_config import DecoderConfig
from worker_service.models.decoders.decoder_layer import DecoderLayer, pack_layer
from worker_service.models.decoders.shard import Shard
from worker_service.models.layers.embedding import Embedding
from worker_service.models.layers.linear import NONE_QUANTIZED, Linear, Quantization, Quantized, head_quantization
from worker_service.models.layers.per_layer import PerLayerEmbeddings
from worker_service.parallel.ranks import ALONE, Ranks


class Decoder:
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
        """Allocate this rank's weights unfilled. batch_invariant: see `ops_for`. fill: copies checkpoint tensors to
        their places. If given, `pack` allocates one layer at a time, and lets `fill` read the matrices needed in
        floating point; `pack` then raises the errors of `fill`."""
        self.config = config
        self._ranks = ranks
        self._ops: Ops = ops_for(device, batch_invariant)
        shard = Shard.of(config, ranks.rank, ranks.size)
        num_rows = -(-config.vocabulary_size // ranks.size)  # the last rank may have rows without a token
        table = partial(torch.empty, num_rows, config.hidden_size, dtype=dtype, device=device)
        self._embedding = Embedding(table(), shard.vocabulary, ranks)
        self._layers = [
            DecoderLayer(
                own := config.of_layer(layer),
                layer,
                dtype,
                device,
                ranks,
                shard if own is config else Shard.of(own, ranks.rank, ranks.size),
                self._ops,
                deferred=fill is not None,
            )
            for layer in config.layers
        ]
        self._per_layer: PerLayerEmbeddings | None = None
        if (per_layer := config.per_layer) is not None:
            sizes = per_layer.vocabulary_size, config.hidden_size, len(config.layers), per_layer.size
            self._per_layer = PerLayerEmbeddings(*sizes, config.rms_norm_eps, dtype, device, self._ops)
        self._fill = fill
        self._norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        # Rounded to the weights' dtype, as in training.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        # On the meta device, `empty_like` would import sympy: a fifth of a worker's start.
        head = self._embedding.weight if config.tied_embeddings else table()
        self._lm_head = Linear(head, wide=True, ops=self._ops)
        ropes = {layer.rope for layer in config.layers if layer.rope is not None}
        self._frequencies = {rope: rope.inverse_frequencies.to(device) for rope in ropes}
        self._axes = {rope: rope.axes.to(device) for rope in ropes if rope.axes is not None}
        self._padded = torch.tensor(sorted(config.padded_tokens), dtype=torch.int64, device=device)
        self._shown: tuple[int, ...] = ()
        self._show: Callable[[Sequence[Tensor], Tensor], None] | None = None

    @property
    def embedding(self) -> Callable[[Tensor], Tensor]:
        """A function from token ids [num_tokens] int64 to [num_tokens, hidden_size] float32."""
        return self._embedding

    @property
    def prompt_embeds_size(self) -> int:
        """0 if layers have embeddings of their own, which only a token id selects."""
        return self.config.hidden_size if self._per_layer is None else 0

    def show_states(self, before: Sequence[int], show: Callable[[Sequence[Tensor], Tensor], None]) -> None:
        """In each forward pass, call `show` with the hidden states before the layers in `before`, and the slots. States
        are [num_tokens, hidden_size] in the weights' dtype. In `before`, num_layers means after the last layer, and
        num_layers + 1 after the last norm."""
        self._shown, self._show = tuple(before), show

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        embedding = self._embedding.own_rows(self._embedding.weight)
        tensors = {self.config.embedding_name: embedding, self.config.name("model.norm.weight"): self._norm}
        if not self.config.tied_embeddings:
            tensors["lm_head.weight"] = self._embedding.own_rows(self._lm_head.weight)
        if self._per_layer is not None:
            tensors |= self._per_layer.tensors
        for number, layer in enumerate(self._layers):
            tensors |= {f"model.layers.{number}.{name}": part for name, part in layer.checkpoint_tensors().items()}
        return tensors

    def pack(self, quantization: Quantization = "none", quantized: Quantized = NONE_QUANTIZED) -> None:
        head, embedding = self._lm_head.weight, self.config.embedding_name
        name = embedding if self.config.tied_embeddings else "lm_head.weight"
        if isinstance(quantized.get(embedding), Float8Weight):
            raise ValueError(f"{embedding} is stored in fp8; only weights of linear layers are read so")
        if (found := quantized.get(name)) is not None:
            self._lm_head.pack_parts([found], [len(head)])
        else:
            self._lm_head.pack(head_quantization(head.device, head.dtype, quantization))
        if self.config.tied_embeddings:
            self._embedding.take_rows_of(self._lm_head)
        elif (found := quantized.get(embedding)) is not None:
            rows = Linear(self._embedding.weight)
            rows.pack_parts([found], [len(head)])
            self._embedding.take_rows_of(rows)
        if self._per_layer is not None:
            self._per_layer.pack(quantized)
        for number, layer in enumerate(self._layers):
            pack_layer(layer, f"model.layers.{number}", quantization, quantized, self._fill)

    def allocate_adapters(self, num_slots: int, max_rank: int) -> dict[str, AdapterPlace]:
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
        slots: Slots,
        attention: Attention,
        cache: Cache,
        adapter_slots: Tensor | None = None,
        given: GivenEmbeddings | None = None,
    ) -> Tensor:
        """See `CausalModel.forward`. Hidden states are normalised by the last norm."""
        rotations = {
            rope: rotary_tables(self._turns(rope, positions), frequencies, rope.scale)
            for rope, frequencies in self._frequencies.items()
        }
        temperatures = {layer.temperature for layer in self.config.layers if layer.temperature is not None}
        factors = {temperature: temperature.factors(positions) for temperature in temperatures}
        if len(self._padded):
            token_ids = token_ids.masked_fill(torch.isin(token_ids, self._padded), self.config.padding_token)
        residual, delta = self._embedding(token_ids), None
        if given is not None and self.config.scales_given:
            residual[given.rows] = given.embeddings
        if self._embedding_scale != 1:
            residual *= self._embedding_scale
        if given is not None and not self.config.scales_given:
            residual[given.rows] = given.embeddings
        of_layers = None if self._per_layer is None else self._per_layer(token_ids, residual)
        states: dict[int, Tensor] = {}
        places, used = by_layer(slots, attention, cache), list[LayerPlace | None]()
        for number, (layer, layer_config) in enumerate(zip(self._layers, self.config.layers, strict=True)):
            if number in self._shown:
                states[number] = (residual.clone() if delta is None else residual + delta).to(self._norm.dtype)
            rope, temperature = layer_config.rope, layer_config.temperature
            by_position = ByPosition(
                None if rope is None else rotations[rope], None if temperature is None else factors[temperature]
            )
            if layer_config.reads is not None:
                used.append(used[layer_config.reads])
            else:
                used.append(next(places) if layer_config.attends else None)
            place = used[-1]
            if place is not None and self.config.causal_without_window and layer_config.window is None:
                place = (*place[:2], replace(place[2], visible_ends=None))
            own = None if of_layers is None else of_layers[number]
            delta = layer.forward(delta, residual, by_position, place, adapter_slots, own)
            if given is not None and number < len(given.deep):
                residual[given.deep_rows] += given.deep[number]
        assert delta is not None  # every network has a layer
        normed = self._ops.add_rms_norm(delta, residual, self._norm, self.config.rms_norm_eps, self.config.norm_offset)
        if self._show is not None:
            behind = {len(self._layers): residual, len(self._layers) + 1: normed}
            shown = [(states | behind)[number].to(normed.dtype) for number in self._shown]
            assert isinstance(slots, Tensor)  # heads that draft share the cache's blocks
            self._show(shown, slots)
        return normed

    def _turns(self, rope: Rope, positions: Tensor) -> Tensor:
        """The position by which each pair turns, [num_tokens, pairs]; [num_tokens] if it is the same for all pairs."""
        return positions if positions.dim() == 1 else positions[self._axes[rope]].T.contiguous()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits, cap = self._lm_head(hidden), self.config.logit_soft_cap
        if self.config.logit_divisor != 1:
            logits = logits / self.config.logit_divisor
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        # All ranks get all logits, and so sample the same tokens without further communication.
        return self._ranks.all_gather(logits)[:, : self.config.vocabulary_size].contiguous()
