"""Chooses one token for each row of logits.

A row's token depends on its own logits, parameters, seed and tokens alone, never on its neighbours, so that a sequence
samples the same alone and in a batch. Temperature 0 takes the largest logit, the lowest id among equals; above 0 a
token is drawn as `argmax(logit / temperature + gumbel)` among those that pass the filters.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.noise import gumbel_noise, row_keys
from worker_service.logit_edits import edit_logits
from worker_service.logit_filters import filter_thresholds
from worker_service.session import SequenceState


def sample(logits: Tensor, sequences: Sequence[SequenceState]) -> tuple[list[int], list[bool]]:
    """The new token of each row, and whether its logits allowed none.

    logits: [rows, vocabulary_size], any float type, left as they are; sequences: one a row. A row fails where a logit
    is NaN or +inf, or where its parameters leave none above -inf; its token is then 0.
    """
    largest, token_ids = logits.max(dim=-1)  # NaN counts as largest; the first of equals wins
    finite = largest.isfinite()
    special = [
        row for row, sequence in enumerate(sequences) if sequence.sampling.temperature or sequence.sampling.edits_logits
    ]
    if special:
        rows = torch.tensor(special, device=logits.device)
        edited = logits[rows].float()
        choosers = [sequences[row] for row in special]
        edit_logits(edited, choosers)
        edited_largest, edited_token_ids = edited.max(dim=-1)
        finite[rows] &= edited_largest.isfinite()
        random = [row for row, chooser in enumerate(choosers) if chooser.sampling.temperature]
        if random:
            edited_token_ids[random] = _draw(edited[random], edited_largest[random], [choosers[row] for row in random])
        token_ids[rows] = edited_token_ids
    token_ids.masked_fill_(~finite, 0)
    return token_ids.tolist(), (~finite).tolist()


def _draw(logits: Tensor, largest: Tensor, sequences: Sequence[SequenceState]) -> Tensor:
    """Draw from each row. logits: [rows, vocabulary_size] float32; largest: [rows] their maxima; returns [rows]."""
    params = [sequence.sampling for sequence in sequences]
    device = logits.device
    temperatures = torch.tensor([param.temperature for param in params], device=device)
    # The largest becomes 0 first, so that the tiniest temperature overflows to -inf elsewhere and to nothing worse.
    scaled = (logits - largest[:, None]) / temperatures[:, None]
    scaled.masked_fill_(scaled < filter_thresholds(scaled, params)[:, None], -torch.inf)
    keys = row_keys(
        torch.tensor([param.seed - (param.seed >> 63 << 64) for param in params], device=device),
        torch.tensor([param.index for param in params], device=device),
        torch.tensor([len(sequence.token_ids) for sequence in sequences], device=device),
    )
    return (scaled + gumbel_noise(keys, logits.shape[1])).argmax(dim=-1)
