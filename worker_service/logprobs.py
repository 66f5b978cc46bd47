"""Log-probabilities of tokens under the model itself: the log-softmax of raw logits, before any sampling parameter."""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker_service.session import SequenceState
from worker_service.step import SampleLogprobs


def gather_logprobs(logits: Tensor, token_ids: Tensor, sequence_id: int, num_top: int) -> SampleLogprobs:
    """Report consecutive positions of one sequence.

    logits: [positions, vocabulary_size], any float type; token_ids: [positions] int64, the token that stands there;
    num_top: how many of the likeliest to add. Equally likely tokens are in the order of their ids.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])  # [positions, 1]
    ranks = (logprobs > chosen).sum(-1) + 1
    top_ids = logprobs.topk(num_top).indices.sort(dim=-1).values
    order = logprobs.gather(1, top_ids).sort(dim=-1, descending=True, stable=True)
    top_ids = top_ids.gather(1, order.indices)
    return SampleLogprobs(
        sequence_id=sequence_id,
        width=1 + num_top,
        token_ids=torch.cat((token_ids[:, None], top_ids), dim=1).flatten().tolist(),
        logprobs=torch.cat((chosen, order.values), dim=1).flatten().tolist(),
        ranks=ranks.tolist(),
    )


def sample_logprobs(
    logits: Tensor, token_ids: Sequence[int], failed: Sequence[bool], sequences: Sequence[SequenceState]
) -> list[SampleLogprobs]:
    """Report the sampled token of each row that asks for it and has one. logits: [rows, vocabulary_size]."""
    return [
        gather_logprobs(
            logits[row : row + 1],
            torch.tensor([token_ids[row]], device=logits.device),
            sequence.sequence_id,
            sequence.sampling.logprobs,
        )
        for row, sequence in enumerate(sequences)
        if sequence.sampling.logprobs is not None and not failed[row]
    ]


def concatenate(parts: Sequence[SampleLogprobs]) -> SampleLogprobs:
    """Join reports on consecutive positions of one sequence; at least one."""
    return SampleLogprobs(
        sequence_id=parts[0].sequence_id,
        width=parts[0].width,
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        logprobs=[logprob for part in parts for logprob in part.logprobs],
        ranks=[rank for part in parts for rank in part.ranks],
    )
