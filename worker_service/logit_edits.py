"""What sampling parameters do to logits before a token is chosen: bans, biases and penalties, row by row.

The order is: allowed tokens, bad words and minimum length ban; the bias is added; then repetition, frequency and
presence are penalised. Only rows that ask for something are touched.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker_service.session import SequenceState


def edit_logits(logits: Tensor, sequences: Sequence[SequenceState]) -> None:
    """Edit in place. logits: [rows, vocabulary_size] float32; sequences: one a row."""
    for row, sequence in zip(logits, sequences, strict=True):
        if sequence.sampling.edits_logits:
            _ban(row, sequence)
            _bias(row, sequence)
            if sequence.sampling.penalizes:
                _penalize(row, sequence)


def _ban(row: Tensor, sequence: SequenceState) -> None:
    params = sequence.sampling
    if params.allowed_token_ids:
        allowed = torch.frombuffer(params.allowed_token_ids, dtype=torch.int64).to(row.device)
        kept = row[allowed]
        row.fill_(-torch.inf)
        row[allowed] = kept
    banned = [word[-1] for word in params.bad_words if _ends_with(sequence.token_ids, word[:-1])]
    if len(sequence.token_ids) - sequence.num_prompt_tokens < params.min_tokens:
        banned.extend(params.eos_token_ids)
    if banned:
        row[torch.tensor(banned, device=row.device)] = -torch.inf


def _bias(row: Tensor, sequence: SequenceState) -> None:
    if sequence.sampling.logit_bias:
        token_ids, biases = zip(*sequence.sampling.logit_bias, strict=True)
        row[torch.tensor(token_ids, device=row.device)] += torch.tensor(biases, device=row.device)


def _penalize(row: Tensor, sequence: SequenceState) -> None:
    """Repetition divides positive logits and multiplies negative ones of every token seen, prompt included (Keskar et
    al., 2019); frequency is subtracted once for each time a token was output, presence once if it was at all.
    """
    params = sequence.sampling
    tokens = np.array(sequence.token_ids)
    seen = torch.from_numpy(np.unique(tokens)).to(row.device)
    logits = row[seen]
    row[seen] = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
    unique, times = np.unique(tokens[sequence.num_prompt_tokens :], return_counts=True)
    penalties = params.frequency_penalty * times + params.presence_penalty
    row[torch.from_numpy(unique).to(row.device)] -= torch.from_numpy(penalties.astype(np.float32)).to(row.device)


def _ends_with(token_ids: Sequence[int], suffix: Sequence[int]) -> bool:
    return not suffix or tuple(token_ids[-len(suffix) :]) == tuple(suffix)
