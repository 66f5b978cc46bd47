"""Checks a worker's whole answer before any part is applied: counted tokens cannot be taken back."""

import itertools
import math

import numpy as np

from scheduler_service.core import ModelOutput, SchedulerOutput, Sequence
from scheduler_service.core.outputs import TokenLogprobs

_ROUNDING = 1e-3
"""Rounding error of a log-probability, which is at most 0."""


def check_answer(output: SchedulerOutput, answer: ModelOutput, vocabulary_size: int) -> None:
    """Raise ValueError if a correct worker cannot have given this answer to this step.

    The core checks step number and number of tokens. Sequences that have left are ignored: they may have new ids on
    another worker.
    """
    if answer.token_ids and max(answer.token_ids) >= vocabulary_size:
        raise ValueError(f"the worker sampled token {max(answer.token_ids)} of a vocabulary of {vocabulary_size}")
    if answer.failed_items and not {*answer.failed_items} <= {*output.items_to_encode}:
        raise ValueError("the worker could not decode an image that the step does not encode")
    if answer.num_tokens and len(answer.num_tokens) != output.num_samples:
        raise ValueError(f"the worker counted tokens of {len(answer.num_tokens)} samples of {output.num_samples}")
    num_gained: dict[int, int] = {}  # new tokens, if not one each
    if answer.num_tokens or answer.num_draft_tokens:
        sampled = (sequence for sequence, _, samples in output.scheduled if samples)
        gained, verified = answer.num_tokens or itertools.repeat(1), answer.num_draft_tokens or itertools.repeat(0)
        for sequence, num_tokens, num_drafts in zip(sampled, gained, verified, strict=False):
            # Statistics count drafts of sequences that have left.
            if num_drafts > (room := output.num_draft_tokens.get(sequence, 0)):
                raise ValueError(f"the worker verified {num_drafts} drafts for sequence {sequence.id}, not {room}")
            has_left = sequence in output.dropped
            has_failed = not has_left and sequence.id in answer.failed_sequence_ids
            is_late = not num_tokens and not has_left
            if is_late and not sequence.sampling.form:
                raise ValueError(f"the worker returned no token for sequence {sequence.id}, which has no form")
            if num_tokens > (1 if has_failed else 1 + num_drafts):
                raise ValueError(f"the worker returned {num_tokens} tokens for sequence {sequence.id}")
            if not has_left:
                num_gained[sequence.id] = num_tokens
    if not answer.has_tokens_alone:
        _check_nothing_else(output, answer)
    said = _said(output, answer) if answer.logprobs else {}
    for sequence, num_tokens, samples in [item for item in output.scheduled if item.sequence.reports]:
        sampling = sequence.sampling
        if sequence in output.dropped or sequence.id in answer.failed_sequence_ids:
            continue
        if (pooling := sampling.pooling) is not None:
            num_bytes = pooling.num_vectors(num_tokens, is_last=samples) * pooling.vector_bytes
            if len(vectors := answer.vectors.get(sequence.id, b"")) != num_bytes:
                raise ValueError(
                    f"the worker returned {len(vectors)} bytes of vectors for sequence {sequence.id}, not {num_bytes}"
                )
            if not np.isfinite(np.frombuffer(vectors, "<f2" if pooling.half else "<f4")).all():
                raise ValueError(f"the worker returned vectors with NaN or infinity for sequence {sequence.id}")
        if samples and (width := sampling.num_logprobs) is not None:
            entries, most = answer.logprobs.get(sequence.id, []), num_gained.get(sequence.id, 1)
            if len(entries) != most:
                raise ValueError(
                    f"the worker returned log-probabilities of {len(entries)} tokens for sequence {sequence.id}, "
                    f"which gained {most}"
                )
            for entry, token_id in zip(entries, said.get(sequence.id, ()), strict=True):
                _check_entry(sequence, entry, token_id, width, vocabulary_size)
        entries = answer.prompt_logprobs.get(sequence.id, [])
        if sampling.prompt_logprobs is not None:
            # Each computed token has the log-probability of the next prompt token.
            first = sequence.num_stored_tokens + 1
            due = max(0, min(first + num_tokens, sequence.num_prompt_tokens) - first)
            if len(entries) > num_tokens or (len(entries) != due and not sequence.status.is_finished):
                raise ValueError(
                    f"the worker returned {len(entries)} prompt positions for sequence {sequence.id}, not {due}"
                )
            if not sequence.status.is_finished:
                for entry, token_id in zip(entries, sequence.tokens_between(first, first + due), strict=True):
                    _check_entry(sequence, entry, token_id, sampling.prompt_logprobs, vocabulary_size)


def _check_nothing_else(output: SchedulerOutput, answer: ModelOutput) -> None:
    """Raise ValueError for results that the step did not request."""
    for sequence, _, samples in output.scheduled:
        if sequence in output.dropped:
            continue
        sampling = sequence.sampling
        for what, reports, is_asked in (
            ("log-probabilities", answer.logprobs, samples and sampling.num_logprobs is not None),
            ("log-probabilities of a prompt", answer.prompt_logprobs, sampling.prompt_logprobs is not None),
            ("vectors", answer.vectors, sampling.pooling is not None),
        ):
            if sequence.id in reports and not is_asked:
                raise ValueError(f"the worker returned {what} for sequence {sequence.id}, which asked for none")


def _said(output: SchedulerOutput, answer: ModelOutput) -> dict[int, list[int]]:
    gained, tokens, said = iter(answer.num_tokens or itertools.repeat(1)), iter(answer.token_ids), {}
    for sequence, _, samples in output.scheduled:
        if samples:
            own = list(itertools.islice(tokens, next(gained)))
            if sequence not in output.dropped:
                said[sequence.id] = own
    return said


def _check_entry(sequence: Sequence, entry: TokenLogprobs, token_id: int, width: int, vocabulary_size: int) -> None:
    """Check the log-probabilities of `token_id` and the likeliest tokens."""
    found, *likeliest = entry.token_ids or [-1]
    num_asked, num_found = min(width, vocabulary_size), len(likeliest)
    # Errors quote no token ids, which may come from a prompt.
    if num_found != num_asked or len(set(likeliest)) != num_asked or max(likeliest, default=0) >= vocabulary_size:
        what = f"{num_found} likeliest tokens instead of {num_asked}, or one twice or beyond the vocabulary"
    elif found != token_id or not 0 < entry.rank <= vocabulary_size:
        what = "they are for another token, or with an impossible rank"
    elif not (max(entry.logprobs) <= _ROUNDING and sum(entry.logprobs) > -math.inf):
        what = "one is positive, NaN or infinite"
    elif not _are_of_one_distribution(entry):
        what = "they are out of order, contradict each other, or sum to more than 1"
    else:
        return
    raise ValueError(f"the worker returned invalid log-probabilities for sequence {sequence.id}: {what}")


def _are_of_one_distribution(entry: TokenLogprobs) -> bool:
    """Whether the likeliest are in order, probabilities sum to at most 1, and a repeated token has one value."""
    (token_id, *likeliest), (own, *logprobs) = entry.token_ids, entry.logprobs
    again = logprobs[likeliest.index(token_id)] if token_id in likeliest else own
    in_order = all(one >= other for one, other in itertools.pairwise(logprobs))
    return again == own and in_order and sum(map(math.exp, logprobs)) <= 1 + _ROUNDING
