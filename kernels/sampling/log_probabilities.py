"""Computes log-probabilities of tokens: the log-softmax of the raw logits, to which no sampling parameters have been
applied."""

import torch
from torch import Tensor

_PART = 2**17
"""Number of logits that are processed at a time on a CPU. Eager torch reads them a dozen times, so they should stay in
the cache."""


def log_probabilities(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the log-probabilities of one given token in each row, and of the row's likeliest tokens.

    logits is [rows, vocabulary_size], of any float type. token_ids is [rows] int64, the given tokens. Returns three
    tensors. The first tensor contains token ids, [rows, 1 + num_top] int64: the given token, and then the likeliest
    tokens. Equally likely tokens are in the order of their ids. The second tensor contains the log-probabilities of
    these tokens, [rows, 1 + num_top] float32. The third tensor contains the rank of the given token, [rows] int64,
    which is 1 plus the number of likelier tokens.
    """
    parts = zip(in_small_parts(logits, logits), in_small_parts(token_ids, logits), strict=True)
    columns = zip(*(_log_probabilities(*part, num_top) for part in parts), strict=True)
    ids, logprobs, ranks = (torch.cat(column) for column in columns)
    return ids, logprobs, ranks


def in_small_parts(tensor: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    """Split a tensor by its first dimension, whose entries belong to rows of `logits`. On a CPU, each chunk is for so
    few rows that their logits stay in the cache; on other devices, there is one chunk. Returns at least one chunk."""
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
    """Find the `count` largest values of each row, and their columns, [rows, count] each. Equal values are in the order
    of their columns."""
    columns = values.topk(count).indices.sort(dim=-1).values
    ordered = values.gather(1, columns).sort(dim=-1, descending=True, stable=True)
    return ordered.values, columns.gather(1, ordered.indices)
