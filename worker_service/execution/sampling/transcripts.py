"""The tokens that may come next in a transcript of speech. Time tokens come in pairs around text and never decrease.

A time token stands before and after each part of the text. A part's closing time is followed by the next part's opening
time, or by the end of the transcript. A part's opening time may equal the previous part's closing time. No part has
length zero. The rules equal the rules of Whisper's own decoding (Radford et al., 2023).
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from worker_service.session.session import SequenceState
from worker_service.session.step import TranscriptParams


def edit_transcript(logits: Tensor, sequence: SequenceState) -> None:
    """Edit one row in place. logits: shape [vocabulary_size] float32.

    If the total probability of all time tokens exceeds the probability of every text token, all text tokens are banned.
    The total is computed from a single row, so that the result is independent of other rows.
    """
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
    """Half-open ranges of token ids that may not follow `output`."""
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
