"""Counts of a worker's draft tokens, and of the accepted draft tokens."""

from collections import Counter
from collections.abc import Iterable

from scheduler_service.core import ModelOutput

_FEATURE = "speculate:"
MAX_NAME = 16
"""Maximum number of characters of a proposer's name. The name is a metrics label."""


class Drafts:
    """Counts of the drafts of one worker."""

    def __init__(self) -> None:
        self.proposer = ""
        self.verified = Lengths()
        self.right = Lengths()

    def take(self, answer: ModelOutput) -> None:
        """Add the draft counts of an answer."""
        if any(answer.num_draft_tokens):
            self.verified.count(filter(None, answer.num_draft_tokens))
            self.right.count(number - 1 for number in answer.num_tokens if number > 1)  # a late sequence has 0 tokens


def proposer_of(features: Iterable[str]) -> str:
    """The proposer in a worker's features. The name is empty if the worker does not draft."""
    named = (feature.removeprefix(_FEATURE) for feature in features if feature.startswith(_FEATURE))
    return next((name[:MAX_NAME] for name in named if name.replace("_", "").isalnum()), "")


class Lengths:
    """Counts of the number of consecutive drafts, over all sequences and steps."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def count(self, lengths: Iterable[int]) -> None:
        self._counts.update(lengths)

    @property
    def num_tokens(self) -> int:
        return sum(length * count for length, count in self._counts.items())

    def by_position(self) -> list[int]:
        """Counts of drafts at the first position, at the second, and so on."""
        longest = max(self._counts, default=0)
        return [sum(n for length, n in self._counts.items() if length > place) for place in range(longest)]
