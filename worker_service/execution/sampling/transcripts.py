"""Bans tokens that may not come next in a transcript of speech.

A segment is an opening time token, text tokens, and a closing time token, which the next segment or the end follows.
Times never decrease, and no segment has length zero. Whisper's decoding has the same rules (Radford et al., 2023)."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from worker_service.session.sequence_state import SequenceState
from worker_service.session.step import TranscriptParams


def edit_transcript(logits: Tensor, sequence: SequenceState) -> None:
    """Ban tokens in one row of logits, [vocabulary_size] float32, in place.

    If all time tokens together are likelier than each text token, all text tokens are banned. The sum is computed one
    row at a time, so that other rows do not change its bits."""
    params = sequence.sampling.transcript
    assert params is not None
    output, first = sequence.token_ids[sequence.num_prompt_tokens :], params.first_timestamp
    single = list(chain(params.suppressed, () if output else params.begin_suppressed))
    if single:
        logits[torch.tensor(single, device=logits.device)] = -torch.inf
    if not first:
        return
    for start, stop in banned_ranges(params, output, len(logits)):
        logits[start:stop] = -torch.inf
    times, others = logits[first:].logsumexp(0), logits[:first].max()
    logits[:first].masked_fill_(times > others, -torch.inf)


def banned_ranges(params: TranscriptParams, output: Sequence[int], vocabulary_size: int) -> list[tuple[int, int]]:
    """Banned ranges of ids after `output`, each as (first, last + 1)."""
    first = params.first_timestamp
    if not output:
        return [(0, first), (min(first + params.max_initial + 1, vocabulary_size), vocabulary_size)]
    times = [token_id for token_id in output if token_id >= first]
    ends_part = output[-1] >= first and len(output) > 1 and output[-2] < first
    ranges = []
    if ends_part:
        ranges.append((0, params.num_text_tokens))
    elif output[-1] >= first:
        ranges.append((first, vocabulary_size))
    if times:
        ranges.append((first, times[-1] if ends_part else times[-1] + 1))
    return ranges
