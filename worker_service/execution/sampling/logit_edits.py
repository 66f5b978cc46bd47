"""Edits logits before sampling: bans, biases and penalties.

The order in a row is fixed: bans (form, allowed tokens, bad words, minimum length), logit biases, penalties, and last
the rules for transcripts, which read the edited logits. This file turns parameters into indices of the matrix of
logits, and `kernels.sampling.logit_edits` edits all rows at once."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.inputs import upload
from kernels.sampling import logit_edits as kernel
from worker_service.execution.sampling.form_masks import FormMasks
from worker_service.execution.sampling.transcripts import edit_transcript
from worker_service.session.sequence_state import SequenceState
from worker_service.session.step import TOKENS

_Ids = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float32]
_Bits = npt.NDArray[np.uint8]
_NONE = -1
"""The id of a token for which the prompt has only an embedding."""


def edit_logits(logits: Tensor, sequences: Sequence[SequenceState], masks: FormMasks | None = None) -> None:
    """Edit logits, [rows, vocabulary_size] float32, contiguous, in place. sequences: one for each row."""
    formed = [row for row, sequence in enumerate(sequences) if sequence.sampling.form]
    mask: _Bits = np.empty((0, 0), dtype=np.uint8)
    if formed:
        assert masks is not None
        mask = masks.of([sequences[row] for row in formed])
    restricted: list[int] = []
    allowed: list[_Ids] = []
    banned: list[_Ids] = []
    biased: list[_Ids] = []
    biases: list[_Floats] = []
    seen: list[_Ids] = []
    repetition: list[_Floats] = []
    subtracted: list[_Floats] = []
    for row, sequence in enumerate(sequences):
        params, first = sequence.sampling, row * logits.shape[1]
        if not params.edits_logits:
            continue
        if params.allowed_token_ids:
            restricted.append(row)
            allowed.append(np.frombuffer(params.allowed_token_ids, dtype=np.int64) + first)
        if token_ids := _banned(sequence):
            banned.append(np.array(token_ids, dtype=np.int64) + first)
        if params.logit_bias:
            biased.append(np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int64) + first)
            biases.append(np.array([bias for _, bias in params.logit_bias], dtype=np.float32))
        if params.penalizes:
            tokens, penalties = _penalties(sequence)
            seen.append(tokens + first)
            repetition.append(np.full(len(tokens), params.repetition_penalty, dtype=np.float32))
            subtracted.append(penalties)

    def whole(parts: Sequence[npt.NDArray[Any]], dtype: torch.dtype = torch.int64) -> Tensor:
        numbers = np.concatenate(parts) if parts else ()
        return upload(numbers, dtype, logits.device)

    kernel.edit_logits(
        logits,
        kernel.LogitEdits(
            masked=upload(formed, torch.int64, logits.device),
            mask=upload(mask, torch.uint8, logits.device),
            restricted=upload(restricted, torch.int64, logits.device),
            allowed=whole(allowed),
            banned=whole(banned),
            biased=whole(biased),
            biases=whole(biases, torch.float32),
            seen=whole(seen),
            repetition=whole(repetition, torch.float32),
            subtracted=whole(subtracted, torch.float32),
        ),
    )
    for row, sequence in enumerate(sequences):
        if sequence.sampling.transcript is not None:
            edit_transcript(logits[row], sequence)


def _banned(sequence: SequenceState) -> list[int]:
    params = sequence.sampling
    token_ids = _read(sequence) if params.bad_words else sequence.token_ids
    banned = [word[-1] for word in params.bad_words if _ends_with(token_ids, word[:-1])]
    if len(sequence.token_ids) - sequence.num_prompt_tokens < params.min_tokens:
        banned.extend(params.eos_token_ids)
    return banned


def _penalties(sequence: SequenceState) -> tuple[_Ids, _Floats]:
    """The distinct tokens of prompt and output, and the penalty to subtract from each logit.

    The penalty is the frequency penalty for each occurrence in the output, plus the presence penalty if the token is in
    the output. The repetition penalty is not included."""
    params = sequence.sampling
    tokens = np.array(_read(sequence), dtype=np.int64)
    seen = np.unique(tokens[tokens != _NONE])
    output, times = np.unique(tokens[sequence.num_prompt_tokens :], return_counts=True)
    penalties = np.zeros(len(seen), dtype=np.float32)
    penalties[np.searchsorted(seen, output)] = params.frequency_penalty * times + params.presence_penalty
    return seen, penalties


def _read(sequence: SequenceState) -> "array[int]":
    """The tokens of prompt and output, with `_NONE` where the prompt has embeddings."""
    token_ids = sequence.token_ids
    if sequence.items:
        token_ids = token_ids[:]
        for item in sequence.items:
            if item.image is None:
                token_ids[item.start : item.stop] = array(TOKENS, [_NONE]) * (item.stop - item.start)
    return token_ids


def _ends_with(token_ids: Sequence[int], suffix: Sequence[int]) -> bool:
    return not suffix or tuple(token_ids[-len(suffix) :]) == tuple(suffix)
