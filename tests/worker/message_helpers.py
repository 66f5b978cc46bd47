"""Short constructors of the scheduler's messages."""

from collections.abc import Sequence
from typing import Any

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1.sequence_group_pb2 import GroupSampling


def new_message(
    sequence_id: int,
    token_ids: Sequence[int],
    block_ids: Sequence[int],
    num_computed_tokens: int = 0,
    num_prompt_tokens: int | None = None,
    index: int = 0,
    **sampling: Any,
) -> pb.NewSequence:
    return pb.NewSequence(
        sequence_id=sequence_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        block_ids=block_ids,
        index=index,
        sampling=GroupSampling(**sampling),
    )
