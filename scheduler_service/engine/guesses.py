"""A worker's guesses at how its sequences go on: taken from its answers, and counted.

They are for nothing but speed: what is wrong with one costs a guess, never a session.
"""

from scheduler_service.core import ModelOutput, Scheduler, SchedulerOutput


class Guesses:
    """Of one worker. While the last answer `has_any`, the next step is to verify them, and waits for that answer."""

    def __init__(self) -> None:
        self.has_any = False
        self.num_verified = 0
        self.num_right = 0

    def take(self, scheduler: Scheduler, output: SchedulerOutput, answer: ModelOutput, vocabulary_size: int) -> None:
        """An answer has been taken in."""
        if output.draft_tokens:
            self.num_verified += sum(map(len, output.draft_tokens.values()))
            self.num_right += sum(answer.num_tokens) - len(answer.num_tokens)
        sound = {
            sequence_id: token_ids
            for sequence_id, token_ids in answer.draft_tokens.items()
            if token_ids and max(token_ids) < vocabulary_size
        }
        self.has_any = bool(sound)
        if sound:
            scheduler.update_draft_token_ids(sound)
