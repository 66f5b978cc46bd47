"""A sequence of the session, and a chunk of it."""

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from worker_service.session.items import PromptItem
from worker_service.session.step import TOKENS, SamplingParams, Tables

STOP = attrgetter("stop")


@dataclass(slots=True)
class SequenceState:
    """A sequence that the scheduler has added and not removed."""

    sequence_id: int
    token_ids: "array[int]"
    """Prompt and output. The worker appends each sampled token."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Leading tokens whose keys and values are in the blocks."""
    block_ids: "array[int]"
    sampling: SamplingParams
    adapter: str = ""
    """The fingerprint of the LoRA adapter; empty for the base model."""
    form_progress: object = None
    """Progress in the output form (grammar), for the package `execution` only."""
    speculation: object = None
    """The drafter's record, for the package `speculation` only."""
    pooled: object = None
    """Partial result of pooling the prompt, for the package `execution` only."""
    is_encoder: bool = False
    """Whether the blocks contain keys and values for cross attention."""
    features: bytes = b""
    """Audio features of an encoder input, see `NewSequence`."""
    encoder: "SequenceState | None" = None
    """The encoder input to which this sequence attends."""
    further_tables: Tables = ()
    """The block tables of further groups of layers."""
    items: tuple[PromptItem, ...] = ()
    """Embeddings and images in place of prompt tokens, in order."""

    @property
    def tables(self) -> Tables:
        """The block tables of all groups of layers."""
        return (self.block_ids, *self.further_tables)

    @property
    def reports(self) -> bool:
        """Whether the next answer contains vectors or log-probabilities of the sequence."""
        if self.sampling.pooling is not None:
            return True
        in_prompt = self.num_computed_tokens + 1 < self.num_prompt_tokens
        return self.sampling.logprobs is not None or (self.sampling.prompt_logprobs is not None and in_prompt)


class ScheduledChunk(NamedTuple):
    """Tokens [start, stop) of a sequence, which one step computes."""

    sequence: SequenceState
    start: int
    stop: int
    samples: bool
    """Whether the sequence gains a token. If so, the chunk ends with the sequence's last token."""
    drafts: "array[int]" = array(TOKENS)
    """Drafts at the end of the chunk. A token is sampled after each draft, too. The session fills the room for drafts
    with `PLACEHOLDER` tokens."""

    @property
    def chooses(self) -> bool:
        """Whether a token is sampled. A pooled sequence gains a placeholder instead."""
        return self.samples and self.sequence.sampling.pooling is None

    @property
    def token_ids(self) -> "array[int]":
        return self.sequence.token_ids[self.start : self.stop] + self.drafts

    def parts_of_items(self) -> Iterator[tuple[PromptItem, int, int]]:
        """The items among the chunk's tokens, each with the sequence's tokens [start, stop) that it shares with the
        chunk."""
        items = self.sequence.items
        for place in range(bisect_right(items, self.start, key=STOP), len(items)):
            item = items[place]
            if item.start >= self.stop:
                break
            yield item, max(self.start, item.start), min(self.stop, item.stop)

    def with_drafts(self, drafts: "array[int]") -> "ScheduledChunk":
        return self._replace(stop=self.stop - len(self.drafts) + len(drafts), drafts=drafts)


NO_DRAFTS: "array[int]" = array(TOKENS)
PLACEHOLDER = 0
"""The token id until the next token is known, or for good if sampling fails."""
