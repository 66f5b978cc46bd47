"""Reports of log-probabilities of prompt tokens and sampled tokens, computed by
`kernels.sampling.log_probabilities`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.sampling.ops import sampling_ops_for
from kernels.upload import upload
from worker_service.session.session import SequenceState
from worker_service.session.step import SampleLogprobs

_MIN = -9999.0
"""Smallest reported log-probability, as in vLLM. Smaller values cannot all be reported, because a logit may be -inf and
JSON has no infinity.
"""


def check_finite(logits: Tensor) -> None:
    """Raise FloatingPointError if log-probabilities cannot be computed for a row of logits. This is so if a logit is
    NaN or +inf, or if all logits of the row are -inf.

    logits: shape [positions, vocabulary_size]. The function waits for a GPU.
    """
    _, largest = sampling_ops_for(logits.device).greedy(logits)
    if not largest.isfinite().all():
        raise FloatingPointError("the logits of a row are not finite")


def gather_logprobs(logits: Tensor, token_ids: Tensor, sequence_id: int, num_top: int) -> SampleLogprobs:
    """Report the log-probabilities at consecutive positions of one sequence.

    logits: shape [positions, vocabulary_size], any float type. token_ids: shape [positions] int64, the token at each
    position. num_top: the number of likeliest tokens that are reported in addition to the token at each position.
    Equally likely tokens are sorted by id. Log-probabilities below `_MIN` are reported as `_MIN`.
    """
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
    """Report the log-probabilities of the tokens that a step has sampled, for sequences that request log-probabilities.

    logits: shape [rows, vocabulary_size]. token_ids: the sampled token of each row. rows_of: each of these sequences
    with its rows of logits.
    """
    reports: dict[int, SampleLogprobs] = {}
    # Rows for which equally many likeliest tokens are requested are computed in one call. The other rows of the call do
    # not change a row's log-probabilities.
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
    """Join reports of log-probabilities at consecutive positions of one sequence. At least one report is required."""
    return SampleLogprobs(
        sequence_id=parts[0].sequence_id,
        width=parts[0].width,
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        logprobs=[logprob for part in parts for logprob in part.logprobs],
        ranks=[rank for part in parts for rank in part.ranks],
    )
