"""Chooses one token for each row of logits.

A row's token depends only on its own logits, parameters, seed and tokens. A sequence therefore samples the same tokens
alone and in a batch. With temperature 0 the token has the largest logit, and the lowest id among equal logits. With a
higher temperature the token is `argmax(logit / temperature + gumbel)` among the tokens that pass the filters. This file
turns sequences into tensors, and `kernels.sampling.eager` chooses the tokens. No function in this file waits for a GPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.sampling.eager import Draws
from kernels.sampling.noise import row_keys
from kernels.sampling.ops import sampling_ops_for
from kernels.upload import upload
from worker_service.execution.sampling.form_masks import FormMasks
from worker_service.execution.sampling.logit_edits import edit_logits
from worker_service.session.session import SequenceState

FAILED = -1
"""The result for a row whose logits are not finite."""
BARRED = -2
"""The result for a row with finite logits, if the sequence's parameters or form ban all tokens."""


def sample(
    logits: Tensor, sequences: Sequence[SequenceState], masks: FormMasks | None = None, *, may_edit: bool = False
) -> Tensor:
    """The new token of each row, [rows] int64 on the device of the logits. A row without a token has FAILED or BARRED.

    logits: shape [rows, vocabulary_size], any float type. If `may_edit`, the logits are overwritten, which saves a
    copy. sequences: one sequence for each row. masks: the masks of sequences that have a form.
    """
    plain = [row for row, sequence in enumerate(sequences) if not sequence.sampling.edits_logits]
    token_ids, finite = _choose(logits, sequences, plain)
    if len(plain) < len(sequences):
        edited = [row for row, sequence in enumerate(sequences) if sequence.sampling.edits_logits]
        rows = upload(edited, torch.int64, logits.device)
        changed = logits
        if plain or not may_edit or logits.dtype is not torch.float32:
            changed = logits.index_select(0, rows).to(torch.float32)  # indexing by [rows] took four times as long
        choosers = [sequences[row] for row in edited]
        edit_logits(changed, choosers, masks)
        chosen, possible = _choose(changed, choosers, range(len(choosers)))
        token_ids[rows] = chosen.masked_fill_(~possible, BARRED)
    return token_ids.masked_fill_(~finite, FAILED)


def _choose(logits: Tensor, sequences: Sequence[SequenceState], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return each row's token, and whether the row has a finite logit.

    If a row of `rows` has a temperature, its token is sampled. All other rows choose the largest logit.
    """
    ops = sampling_ops_for(logits.device)
    token_ids, largest = ops.greedy(logits)
    drawing = [row for row in rows if sequences[row].sampling.temperature]
    if drawing:
        draws = _draws(sequences, drawing, logits.device)
        token_ids[draws.rows] = ops.draw(logits, largest, draws)
    return token_ids, largest.isfinite()


def _draws(sequences: Sequence[SequenceState], rows: Sequence[int], device: torch.device) -> Draws:
    params = [sequences[row].sampling for row in rows]
    keys = row_keys(
        torch.tensor([param.seed - (param.seed >> 63 << 64) for param in params]),
        torch.tensor([param.index for param in params]),
        torch.tensor([len(sequences[row].token_ids) for row in rows]),
    )
    whole = torch.stack((torch.tensor(rows), keys, torch.tensor([param.top_k for param in params])))
    fractions = [[param.temperature, param.min_p, param.top_p] for param in params]
    row_ids, keys, top_k = upload(whole, torch.int64, device)
    temperature, min_p, top_p = upload(fractions, torch.float32, device).T.contiguous()
    return Draws(row_ids, keys, temperature, min_p, top_k, top_p)
