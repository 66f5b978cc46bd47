"""A worker's guesses at how its sequences go on: taken from its answers, and counted.

They are for nothing but speed: what is wrong with one costs a guess, never a session.
"""

from collections import Counter
from collections.abc import Iterable

from scheduler_service.core import ModelOutput, Scheduler, SchedulerOutput


class Guesses:
    """Of one worker. While the last answer `has_any`, the next step is to verify them, and waits for that answer."""

    def __init__(self) -> None:
        self.has_any = False
        self.verified = Lengths()
        self.right = Lengths()

    def take(self, scheduler: Scheduler, output: SchedulerOutput, answer: ModelOutput, vocabulary_size: int) -> None:
        """An answer has been taken in."""
        if output.draft_tokens:
            lengths = list(map(len, output.draft_tokens.values()))
            self.verified.count(lengths)
            most = max(lengths)  # more may be said of sequences that have left the worker
            self.right.count(min(number - 1, most) for number in answer.num_tokens)
        sound = {
            sequence_id: token_ids
            for sequence_id, token_ids in answer.draft_tokens.items()
            if token_ids and max(token_ids) < vocabulary_size
        }
        self.has_any = bool(sound)
        if sound:
            scheduler.update_draft_token_ids(sound)


class Lengths:
    """How many guesses in a row there were, for a sequence and step."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def count(self, lengths: Iterable[int]) -> None:
        self._counts.update(lengths)

    @property
    def num_tokens(self) -> int:
        return sum(length * count for length, count in self._counts.items())

    def by_position(self) -> list[int]:
        """How many there were in the first place of a row, in the second, and so on."""
        longest = max(self._counts, default=0)
        return [sum(n for length, n in self._counts.items() if length > place) for place in range(longest)]
