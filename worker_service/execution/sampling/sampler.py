"""Chooses one token for each row of logits.

The token of a row depends only on the row's logits and on its sequence's parameters, seed and tokens. A sequence
therefore samples the same tokens alone and in a batch. With temperature 0, the token with the largest logit is chosen;
if logits are equal, the token with the lowest id. With a higher temperature the token is `argmax(logit / temperature +
gumbel)` among the tokens that pass the filters (top-k, top-p and min-p). This file turns sampling parameters into
tensors, and a backend of `kernels.sampling.ops` chooses the tokens. No function in this file waits for a GPU.
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
"""The result of `sample` for a row whose logits are not finite."""
BARRED = -2
"""The result of `sample` for a row with finite logits, if the sequence's parameters or output form ban all tokens."""


def sample(
    logits: Tensor, sequences: Sequence[SequenceState], masks: FormMasks | None = None, *, may_edit: bool = False
) -> Tensor:
    """Choose a token for each row of logits. Returns [rows] int64 on the device of the logits, with FAILED or BARRED
    for a row without a token.

    logits: shape [rows, vocabulary_size], any float type. If `may_edit`, the logits may be overwritten, which saves a
    copy. sequences: one sequence for each row. masks: the masks of sequences that have an output form.
    """
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
    """Choose a token for each row of logits. Returns the tokens, and for each row whether its largest logit is finite.

    The token of a row is drawn at random if the row is in `rows` and its temperature is not 0. In all other rows the
    token with the largest logit is chosen.
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
