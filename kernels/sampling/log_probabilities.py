"""Log-probabilities of tokens under the model itself: the log-softmax of raw logits, before any sampling parameter."""

import torch
from torch import Tensor

_PART = 2**17
"""Numbers in one chunk of eager torch on a CPU: a dozen passes over half a megabyte stay in its cache."""


def log_probabilities(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of one token in each row, and of the likeliest tokens.

    logits: [rows, vocabulary_size], any float type; token_ids: [rows] int64. Returns the token and the num_top
    likeliest, [rows, 1 + num_top] int64, equally likely tokens in the order of their ids; their log-probabilities,
    float32; and the rank of the token, [rows] int64: 1 plus the number of likelier tokens.
    """
    parts = zip(in_small_parts(logits, logits), in_small_parts(token_ids, logits), strict=True)
    columns = zip(*(_log_probabilities(*part, num_top) for part in parts), strict=True)
    ids, logprobs, ranks = (torch.cat(column) for column in columns)
    return ids, logprobs, ranks


def in_small_parts(tensor: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    """Split a tensor whose first dimension is rows of logits into chunks that suit the device; at least one."""
    if logits.device.type != "cpu":
        return (tensor,)
    return torch.split(tensor, max(1, _PART // logits.shape[1]))


def _log_probabilities(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])  # [rows, 1]
    ranks = (logprobs > chosen).sum(-1) + 1
    top, top_ids = largest_in_order(logprobs, num_top)
    return torch.cat((token_ids[:, None], top_ids), dim=1), torch.cat((chosen, top), dim=1), ranks


def largest_in_order(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest values of each row, equal ones in the order of their columns, and their columns: [rows, count]."""
    columns = values.topk(count).indices.sort(dim=-1).values
    ordered = values.gather(1, columns).sort(dim=-1, descending=True, stable=True)
    return ordered.values, columns.gather(1, ordered.indices)
