"""Computes the steps of an encoder-decoder: first the encoder inputs, then the decoder's tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from kernels.inputs import AttentionMetadata, upload
from worker_service.execution.adapters.adapters import Adapters
from worker_service.execution.cache.cache_engine import CacheEngine
from worker_service.execution.sampling.alignment import Aligner
from worker_service.execution.sampling.forms import Forms
from worker_service.execution.steps.model_runner import ModelRunner, build_batch
from worker_service.execution.steps.running_step import RunningStep
from worker_service.models.causal_model import CausalModel
from worker_service.session.sequence_state import ScheduledChunk, SequenceState

if TYPE_CHECKING:
    from worker_service.models.encoders.encoder_decoder import EncoderDecoder  # this import loads transformers


class EncoderDecoderRunner(ModelRunner):
    """Computes steps with an encoder-decoder model and its KV cache. Not thread-safe."""

    def __init__(
        self,
        model: "EncoderDecoder",
        cache_engine: CacheEngine,
        forms: Forms | None = None,
        adapters: Adapters | None = None,
        aligner: Aligner | None = None,
    ) -> None:
        """aligner: required if the model reports the times of a transcript's tokens."""
        super().__init__(cast(CausalModel, model), cache_engine, forms=forms, adapters=adapters)
        self._model = model
        self._aligner = aligner
        # The step's cross-attention queries by layer, if a request asks for the times of tokens.
        self._queries: dict[int, Tensor] = {}

    def _encode(self, chunks: Sequence[ScheduledChunk]) -> Sequence[ScheduledChunk]:
        cache = self.cache_engine.device_blocks
        for chunk in chunks:
            if chunk.sequence.is_encoder:
                slots = self._slots(chunk.sequence)
                self._model.encode(self._given(chunk.sequence), slots, cache, self._adapter_slots([chunk]))
        return [chunk for chunk in chunks if not chunk.sequence.is_encoder]

    def _given(self, sequence: SequenceState) -> Tensor:
        if not sequence.features:
            return upload(sequence.token_ids, torch.int64, self.device)
        features = np.frombuffer(sequence.features, dtype="<f4").reshape(self._model.config.num_mel_bins, -1)
        return upload(features.astype(np.float32), torch.float32, self.device)

    def _slots(self, sequence: SequenceState) -> Tensor:
        block_size = self.cache_engine.device_blocks.shape[3]
        positions = np.arange(sequence.num_prompt_tokens)
        slots = np.asarray(sequence.block_ids)[positions // block_size] * block_size + positions % block_size
        return upload(slots, torch.int64, self.device)

    def _forward(self, chunks: Sequence[ScheduledChunk], before: RunningStep | None) -> tuple[Tensor, Sequence[int]]:
        assert before is None
        cache = self.cache_engine.device_blocks
        batch = build_batch(chunks, cache.shape[3], self.device)
        encoders = [chunk.sequence.encoder for chunk in chunks if chunk.sequence.encoder is not None]
        tables = np.zeros((len(chunks), max(len(encoder.block_ids) for encoder in encoders)), dtype=np.int64)
        for row, encoder in enumerate(encoders):
            tables[row, : len(encoder.block_ids)] = encoder.block_ids
        cross = AttentionMetadata.build(
            [chunk.stop - chunk.start for chunk in chunks],
            [encoder.num_prompt_tokens for encoder in encoders],
            torch.from_numpy(tables),
            self.device,
        )
        inputs = (batch.token_ids, batch.positions, batch.slots, batch.attention)
        self._queries = {}
        queries = self._queries if any(chunk.sequence.sampling.pooling for chunk in chunks) else None
        return self._model.forward(*inputs, cache, cross, self._adapter_slots(chunks), queries), batch.query_start

    def _pool(
        self, chunks: Sequence[ScheduledChunk], query_start: Sequence[int], hidden: Tensor
    ) -> list[tuple[ScheduledChunk, Tensor]]:
        """The times of a transcript's tokens, for each prompt whose last chunk is in the step."""
        del hidden
        queries, self._queries = self._queries, {}
        completed = []
        for chunk, start, stop in zip(chunks, query_start, query_start[1:], strict=False):
            if chunk.sequence.sampling.pooling is not None:
                assert self._aligner is not None  # without an aligner, codec.py refuses the step
                cache = self.cache_engine.device_blocks
                times = self._aligner.take(chunk, {layer: of[start:stop] for layer, of in queries.items()}, cache)
                if times is not None:
                    completed.append((chunk, times))
        return completed
