"""Computes log-probabilities of tokens: the log-softmax of raw logits, without sampling parameters."""

import torch
from torch import Tensor

_PART = 2**17
"""Logits that a CPU processes at a time: read a dozen times, they should stay in its cache."""


def log_probabilities(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of a given token and the likeliest tokens of each row.

    logits: [rows, vocabulary_size], any float type. token_ids: [rows] int64. Returns token ids [rows, 1 + num_top]
    int64 (the given token, then the likeliest, equals by id), their log-probabilities in float32, and the given token's
    rank [rows] int64: 1 plus the number of likelier tokens.
    """
    parts = zip(in_small_parts(logits, logits), in_small_parts(token_ids, logits), strict=True)
    columns = zip(*(_log_probabilities(*part, num_top) for part in parts), strict=True)
    ids, logprobs, ranks = (torch.cat(column) for column in columns)
    return ids, logprobs, ranks


def in_small_parts(tensor: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    """Split by rows of `logits` that stay in a CPU's cache; elsewhere one chunk. Returns at least one chunk."""
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
    """The `count` largest values of each row and their columns, [rows, count]; equals by column."""
    columns = values.topk(count).indices.sort(dim=-1).values
    ordered = values.gather(1, columns).sort(dim=-1, descending=True, stable=True)
    return ordered.values, columns.gather(1, ordered.indices)
