"""Chooses one token for each row of logits.

A row's token depends only on its logits and its sequence, so a sequence samples the same tokens alone and in a batch.
With temperature 0, the largest logit wins; of equal logits, the lowest id. Otherwise the token is `argmax(logit /
temperature + gumbel)` among the tokens that pass top-k, top-p and min-p. No function here waits for a GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.inputs import upload
from kernels.sampling.eager import Draws
from kernels.sampling.noise import row_keys
from kernels.sampling.ops import sampling_ops_for
from worker_service.execution.sampling.form_masks import FormMasks
from worker_service.execution.sampling.logit_edits import edit_logits
from worker_service.session.sequence_state import SequenceState

FAILED = -1
"""The result for a row whose logits are not finite."""
BARRED = -2
"""The result for a row with finite logits if parameters or output form ban all tokens."""


def sample(
    logits: Tensor, sequences: Sequence[SequenceState], masks: FormMasks | None = None, *, may_edit: bool = False
) -> Tensor:
    """Choose a token for each row. Returns [rows] int64 on the logits' device, with FAILED or BARRED for a row without
    a token.

    logits: [rows, vocabulary_size], any float type; overwriting them (`may_edit`) saves a copy. sequences: one for each
    row."""
    plain = [row for row, sequence in enumerate(sequences) if not sequence.sampling.edits_logits]
    token_ids, finite = _choose(logits, sequences, plain)
    if len(plain) < len(sequences):
        edited = [row for row, sequence in enumerate(sequences) if sequence.sampling.edits_logits]
        rows = upload(edited, torch.int64, logits.device)
        changed = logits
        if plain or not may_edit or logits.dtype is not torch.float32:
            changed = logits.index_select(0, rows).to(torch.float32)  # four times as fast as logits[rows]
        choosers = [sequences[row] for row in edited]
        edit_logits(changed, choosers, masks)
        chosen, possible = _choose(changed, choosers, range(len(choosers)))
        token_ids[rows] = chosen.masked_fill_(~possible, BARRED)
    return token_ids.masked_fill_(~finite, FAILED)


def _choose(logits: Tensor, sequences: Sequence[SequenceState], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Draw a token at random in `rows` with a temperature, and choose the largest logit in all others. Returns the
    tokens, and whether each row's largest logit is finite."""
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
