"""Reports of log-probabilities of prompt tokens and sampled tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.inputs import upload
from kernels.sampling.ops import sampling_ops_for
from worker_service.session.sequence_state import SequenceState
from worker_service.session.step import SampleLogprobs

_MIN = -9999.0
"""Smallest reported log-probability, as in vLLM: a logit may be -inf, and JSON has no infinity."""


def check_finite(logits: Tensor) -> None:
    """Raise FloatingPointError if a logit is NaN or +inf, or if all logits of a row are -inf. Waits for a GPU.

    logits: shape [positions, vocabulary_size]."""
    _, largest = sampling_ops_for(logits.device).greedy(logits)
    if not largest.isfinite().all():
        raise FloatingPointError("the logits of a row are not finite")


def gather_logprobs(logits: Tensor, token_ids: Tensor, sequence_id: int, num_top: int) -> SampleLogprobs:
    """Report log-probabilities at consecutive positions of one sequence.

    logits: [positions, vocabulary_size], any float type. token_ids: [positions] int64. num_top: likeliest tokens to
    report besides the token at each position. Ties are sorted by id."""
    ids, logprobs, ranks = sampling_ops_for(logits.device).log_probabilities(logits, token_ids, num_top)
    return SampleLogprobs(
        sequence_id=sequence_id,
        width=1 + num_top,
        token_ids=ids.flatten().tolist(),
        logprobs=logprobs.clamp(min=_MIN).flatten().tolist(),
        ranks=ranks.tolist(),
    )


def sample_logprobs(
    logits: Tensor, token_ids: Sequence[int], rows_of: Sequence[tuple[SequenceState, range]]
) -> list[SampleLogprobs]:
    """Report the log-probabilities of sampled tokens.

    logits: [rows, vocabulary_size]. token_ids: the sampled token of each row. rows_of: sequences with
    log-probabilities, and their rows."""
    reports: dict[int, SampleLogprobs] = {}
    # One call for all rows with the same number of likeliest tokens. Other rows do not change a row's result.
    for num_top in {sequence.sampling.logprobs for sequence, _ in rows_of}:
        assert num_top is not None
        asking = [(sequence, rows) for sequence, rows in rows_of if sequence.sampling.logprobs == num_top]
        all_rows = [row for _, rows in asking for row in rows]
        together = gather_logprobs(
            logits[upload(all_rows, torch.int64, logits.device)],
            upload([token_ids[row] for row in all_rows], torch.int64, logits.device),
            0,
            num_top,
        )
        width, start = together.width, 0
        for sequence, rows in asking:
            stop = start + len(rows)
            reports[sequence.sequence_id] = SampleLogprobs(
                sequence_id=sequence.sequence_id,
                width=width,
                token_ids=together.token_ids[start * width : stop * width],
                logprobs=together.logprobs[start * width : stop * width],
                ranks=together.ranks[start:stop],
            )
            start = stop
    return [reports[sequence.sequence_id] for sequence, _ in rows_of]


def concatenate(parts: Sequence[SampleLogprobs]) -> SampleLogprobs:
    """Join one or more reports of consecutive positions of one sequence."""
    return SampleLogprobs(
        sequence_id=parts[0].sequence_id,
        width=parts[0].width,
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        logprobs=[logprob for part in parts for logprob in part.logprobs],
        ranks=[rank for part in parts for rank in part.ranks],
    )
