"""Computes the steps of an encoder: vectors or scores of whole texts."""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.inputs import upload
from worker_service.execution.sampling.pooling import pool_all
from worker_service.execution.steps.model_runner import Runner
from worker_service.execution.steps.running_step import RunningStep, StepClock
from worker_service.session.sequence_state import ScheduledChunk
from worker_service.session.step import SchedulerOutput

if TYPE_CHECKING:
    # This import loads transformers, which takes two seconds.
    from worker_service.models.encoders.encoder import Encoder


class EncoderRunner(Runner):
    """Computes steps with an encoder. Not thread-safe."""

    runs_ahead = False

    def __init__(self, model: "Encoder", device: torch.device) -> None:
        super().__init__(device)
        self._model = model

    @torch.inference_mode()
    def launch(
        self, output: SchedulerOutput, chunks: Sequence[ScheduledChunk], before: RunningStep | None = None
    ) -> RunningStep:
        """An encoder's step moves no blocks, and is never launched ahead."""
        del output, before
        clock = StepClock(self.device)
        clock.mark()
        vectors = []
        if chunks:
            ordered = sorted(chunks, key=lambda chunk: chunk.stop)  # attention batches texts of equal length
            lengths = [chunk.stop for chunk in ordered]
            starts = [0, *accumulate(lengths)]
            positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
            firsts = [_num_first_tokens(chunk) for chunk in ordered]
            states = self._model.forward(
                upload(np.concatenate([chunk.token_ids for chunk in ordered]), torch.int64, self.device),
                upload(positions, torch.int64, self.device),
                upload(positions >= np.repeat(firsts, lengths), torch.int64, self.device),
                lengths,
            )
            classify = self._model.classify if self._model.config.num_labels else None
            vectors = pool_all(ordered, starts, states, classify)
        clock.mark()
        nothing = torch.empty(0)
        return RunningStep(chunks, clock, nothing, nothing.long(), [], set(), vectors)


def _num_first_tokens(chunk: ScheduledChunk) -> int:
    """The number of tokens before the second text of a pair, or of all tokens of a single text."""
    pooling = chunk.sequence.sampling.pooling
    return (pooling and pooling.num_first_tokens) or chunk.stop
