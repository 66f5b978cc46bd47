"""Short constructors of the worker's own types."""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from worker_service.execution.sampling.form_process import HEAD, Follower, Work
from worker_service.session.items import Embeddings, PromptItem
from worker_service.session.sequence_state import SequenceState
from worker_service.session.step import TOKENS, Limits, NewSequence, SamplingParams

LIMITS = Limits(
    block_size=4,
    num_device_blocks=64,
    num_host_blocks=8,
    vocabulary_size=131,
    max_model_len=128,
    max_num_batched_tokens=256,
    max_num_seqs=16,
)


def tokens(values: Sequence[int]) -> "array[int]":
    return array(TOKENS, values)


def state(
    token_ids: Sequence[int], num_prompt_tokens: int | None = None, sequence_id: int = 1, **sampling: Any
) -> SequenceState:
    """A sequence about to sample."""
    prompt = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
    return SequenceState(
        sequence_id, tokens(token_ids), prompt, len(token_ids), tokens(range(32)), SamplingParams(**sampling)
    )


def new_sequence(
    sequence_id: int,
    token_ids: Sequence[int],
    block_ids: Sequence[int],
    num_computed_tokens: int = 0,
    num_prompt_tokens: int | None = None,
    items: tuple[PromptItem, ...] = (),
    **sampling: Any,
) -> NewSequence:
    prompt = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
    params = SamplingParams(**sampling)
    return NewSequence(
        sequence_id, tokens(token_ids), prompt, num_computed_tokens, tokens(block_ids), params, items=items
    )


def embeddings_item(embeddings: Tensor, start: int) -> PromptItem:
    """Embeddings, [tokens, size] float32, in place of the prompt's tokens from `start` on."""
    number, data = len(embeddings), memoryview(embeddings.numpy().tobytes())
    digest = hashlib.sha256(data).digest()
    return PromptItem(digest, start, start + number, Embeddings("F32", number, data))


def mask_of(follower: Follower, work: Work) -> bytes:
    """The mask without drafts, once the form is compiled and the output parsed."""
    (answer,) = follower.do([work])
    while HEAD.unpack_from(answer)[-1]:
        (answer,) = follower.do([work._replace(form="", token_ids=[])])
    return answer[HEAD.size :]
