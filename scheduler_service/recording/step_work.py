"""The sizes of a step that determine its time."""

from typing import NamedTuple

from scheduler_service.core import SchedulerOutput


class StepWork(NamedTuple):
    """A decode token is alone in its chunk; other tokens and verified drafts are prefill tokens.

    `context_tokens`: tokens that the sequences' last tokens attend to, without drafts. `encoded_tokens`: of images
    that the step encodes.
    """

    prefill_tokens: int
    decode_tokens: int
    context_tokens: int
    swapped_blocks: int
    encoded_tokens: int = 0

    @classmethod
    def of(cls, output: SchedulerOutput) -> "StepWork":
        """The work without drafts, before the next step is planned."""
        prefill = decode = context = 0
        for sequence, num_tokens, _ in output.scheduled:
            # num_computed_tokens includes the tokens of this step
            context += sequence.num_computed_tokens - sequence.num_draft_tokens
            if num_tokens == 1 + output.num_draft_tokens.get(sequence, 0):
                decode += 1
            else:
                prefill += num_tokens
        swapped = len(output.blocks_to_swap_out) + len(output.blocks_to_swap_in)
        return cls(prefill, decode, context, swapped, output.num_encoded_tokens)

    def with_drafts(self, number: int) -> "StepWork":
        """The work with `number` verified drafts."""
        return self._replace(prefill_tokens=self.prefill_tokens + number)
