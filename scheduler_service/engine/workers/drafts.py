"""Counts of a worker's guesses at how its sequences go on, and of those that were right."""

from collections import Counter
from collections.abc import Iterable

from scheduler_service.core import ModelOutput

_FEATURE = "speculate:"
MAX_NAME = 16
"""Characters of a proposer's name, which is a label."""


class Drafts:
    """Counts of one worker."""

    def __init__(self) -> None:
        self.proposer = ""
        self.verified = Lengths()
        self.right = Lengths()

    def take(self, answer: ModelOutput) -> None:
        """An answer has been taken in."""
        if any(answer.num_draft_tokens):
            self.verified.count(filter(None, answer.num_draft_tokens))
            self.right.count(number - 1 for number in answer.num_tokens if number > 1)  # 0 of one that is late


def proposer_of(features: Iterable[str]) -> str:
    """The proposer that a worker with these features guesses with; empty if it does not guess."""
    named = (feature.removeprefix(_FEATURE) for feature in features if feature.startswith(_FEATURE))
    return next((name[:MAX_NAME] for name in named if name.replace("_", "").isalnum()), "")


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
