"""A step's work for its worker, in the numbers that its time depends on."""

from typing import NamedTuple

from scheduler_service.core import SchedulerOutput


class StepWork(NamedTuple):
    """Sizes that the time of a step depends on.

    A prefill token is in a chunk of several tokens; a decode token is a chunk of its own. Guesses that are verified
    behind one count as prefill tokens. Context is summed over the scheduled sequences: the tokens that each sequence's
    last token attends to, without guesses.
    """

    prefill_tokens: int
    decode_tokens: int
    context_tokens: int
    swapped_blocks: int

    @classmethod
    def of(cls, output: SchedulerOutput) -> "StepWork":
        """The work of a step without guesses; to be asked before the next one is planned."""
        prefill = decode = context = 0
        for sequence, num_tokens, _ in output.scheduled:
            context += sequence.num_computed_tokens - sequence.num_draft_tokens  # with the tokens of this step
            if num_tokens == 1 + output.num_draft_tokens.get(sequence, 0):
                decode += 1
            else:
                prefill += num_tokens
        return cls(prefill, decode, context, len(output.blocks_to_swap_out) + len(output.blocks_to_swap_in))

    def with_drafts(self, number: int) -> "StepWork":
        """The work of the same step in which so many guesses are verified."""
        return self._replace(prefill_tokens=self.prefill_tokens + number)
