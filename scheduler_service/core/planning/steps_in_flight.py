"""The steps that a worker was sent and has not answered, and when it answered the last one."""

from collections import deque
from collections.abc import Iterable

from scheduler_service.core.groups.sequence import Sequence, SequenceGroup
from scheduler_service.core.outputs import ModelOutput, SchedulerOutput


class StepsInFlight:
    """`outputs` are those without an answer, the oldest first; `prompt_seconds` took the last step of only prompts."""

    __slots__ = ("answered_at", "outputs", "prompt_seconds")

    def __init__(self) -> None:
        self.outputs: deque[SchedulerOutput] = deque()
        self.answered_at = float("-inf")
        self.prompt_seconds = 0.0

    @property
    def began_at(self) -> float:
        """When the worker could begin with the oldest step: it was there, and the one before was answered."""
        return max(self.outputs[0].planned_at, self.answered_at)

    @property
    def num_tokens(self) -> int:
        return sum(output.num_tokens for output in self.outputs)

    def drop(self, sequences: Iterable[Sequence]) -> None:
        """These leave the worker: the answers to come are not for them."""
        for output in self.outputs:
            output.dropped.update(sequences)

    def answer(self, output: SchedulerOutput, answer: ModelOutput, now: float) -> float:
        """Take a step off; returns how many seconds it took. Raises ValueError when the answer is not to this step."""
        if not self.outputs or self.outputs[0] is not output:
            raise ValueError(f"step {output.step_id} is not the oldest without an answer")
        if answer.step_id != output.step_id:
            raise ValueError(f"the worker answered step {answer.step_id} instead of step {output.step_id}")
        if len(answer.num_tokens or answer.token_ids) != output.num_samples:
            raise ValueError(f"the worker returned {len(answer.token_ids)} tokens for {output.num_samples} samples")
        for numbers in (answer.num_draft_tokens, answer.num_draft_tokens_wanted):
            if numbers and len(numbers) != output.num_samples:
                raise ValueError(f"the worker counted guesses of {len(numbers)} samples of {output.num_samples}")
        seconds = now - self.began_at
        self.outputs.popleft()
        self.answered_at = now
        if output.prompts_began is not None:
            self.prompt_seconds = now - output.prompts_began
        return seconds


def groups_in(output: SchedulerOutput) -> dict[SequenceGroup, None]:
    """The groups of which a step computes tokens, also if they have left the worker since it was planned."""
    return dict.fromkeys(sequence.group for sequence, _, _ in output.scheduled)
