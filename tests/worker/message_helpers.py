"""Short ways to say what the scheduler says, in messages."""

from collections.abc import Sequence
from typing import Any

from pagewire.v1 import scheduler_output_pb2 as pb


def sampling_message(**changes: Any) -> pb.SequenceSampling:
    """Greedy sampling with every default filled in, as the scheduler sends it."""
    return pb.SequenceSampling(**{"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, **changes})


def new_message(
    sequence_id: int,
    token_ids: Sequence[int],
    block_ids: Sequence[int],
    num_computed_tokens: int = 0,
    num_prompt_tokens: int | None = None,
    **sampling: Any,
) -> pb.NewSequence:
    """A new sequence as the scheduler sends it."""
    return pb.NewSequence(
        sequence_id=sequence_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        block_ids=block_ids,
        sampling=sampling_message(**sampling),
    )
