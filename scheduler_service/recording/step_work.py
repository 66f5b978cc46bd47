"""The sizes of a step that determine its time."""

from typing import NamedTuple

from scheduler_service.core import SchedulerOutput


class StepWork(NamedTuple):
    """The sizes of a step that determine its time.

    A prefill token is a token in a chunk of several tokens. A decode token is alone in its chunk. Verified drafts after
    a decode token count as prefill tokens. `context` is the sum over all scheduled sequences. A sequence's context is
    the number of tokens that its last token attends to, without drafts.
    """

    prefill_tokens: int
    decode_tokens: int
    context_tokens: int
    swapped_blocks: int

    @classmethod
    def of(cls, output: SchedulerOutput) -> "StepWork":
        """The work of a step without drafts. Call this function before the next step is planned."""
        prefill = decode = context = 0
        for sequence, num_tokens, _ in output.scheduled:
            # num_computed_tokens includes the tokens of this step
            context += sequence.num_computed_tokens - sequence.num_draft_tokens
            if num_tokens == 1 + output.num_draft_tokens.get(sequence, 0):
                decode += 1
            else:
                prefill += num_tokens
        return cls(prefill, decode, context, len(output.blocks_to_swap_out) + len(output.blocks_to_swap_in))

    def with_drafts(self, number: int) -> "StepWork":
        """The work of the same step with `number` verified drafts."""
        return self._replace(prefill_tokens=self.prefill_tokens + number)
