"""What a step makes its worker do, in the numbers that its time depends on."""

from typing import NamedTuple

from scheduler_service.core import SchedulerOutput


class StepWork(NamedTuple):
    """What the time of a step depends on.

    A prefill token is in a chunk of several tokens; a decode token is a chunk of its own, and has guesses behind it
    that count as prefill tokens. Context is summed over the scheduled sequences: the tokens that each sequence's last
    token attends to.
    """

    prefill_tokens: int
    decode_tokens: int
    context_tokens: int
    swapped_blocks: int

    @classmethod
    def of(cls, output: SchedulerOutput) -> "StepWork":
        """The work of a step; to be asked before the next one is planned."""
        prefill = decode = context = 0
        for sequence, num_tokens, _ in output.scheduled:
            context += sequence.num_computed_tokens  # with the tokens of this step
            num_guesses = len(output.draft_tokens.get(sequence.id, ())) if output.draft_tokens else 0
            if num_tokens == 1 + num_guesses:
                decode, prefill = decode + 1, prefill + num_guesses
            else:
                prefill += num_tokens
        return cls(prefill, decode, context, len(output.blocks_to_swap_out) + len(output.blocks_to_swap_in))
