"""Which workers were lost with one request in flight, and for how long the request was in flight.

suspects/rule.py has the rule that judges these figures.
"""

from dataclasses import dataclass

CLEARING_TOKENS = 4
"""A request that gains so many tokens since a loss had nothing to do with it. More would find those that kill with
their tenth token as well, but in a storm it would have all requests run alone, for long."""


@dataclass(slots=True)
class Suspicion:
    """The evidence about one request, from the first worker that was lost with it in flight."""

    num_losses: int = 0
    """Losses of the row: consecutive losses with the request in flight."""
    num_alone: int = 0
    """Losses of the row, after the first, with no other request in flight."""
    lost_on: frozenset[str] = frozenset()
    """The names of the workers of the row."""
    last_lost_on: str | None = None
    """The worker of the last loss."""
    num_clean_tokens: int = 0
    """Tokens that the request gained since the last loss."""
    seconds: float = 0.0
    """Seconds that the request was in flight since the first loss, on any worker."""
    seconds_alone: float = 0.0
    """Seconds of that time in which no other request was in flight."""
    fleet_losses_before: int = 0
    """Losses that the fleet had at the first loss of the row, this one included."""
    fleet_seconds_before: float = 0.0
    """Seconds that the fleet's workers had served at the first loss of the row."""
    others_at_last: float = 0.0
    """Seconds that workers had served without the request since the first loss, as of the last loss alone."""
    num_looks: int = 0
    """How often the rule was applied in the request's life, in whatever row."""

    @property
    def is_grave(self) -> bool:
        """Whether the request is to be scheduled alone.

        After the second loss it must gain a token alone, after further ones as many as clear it: so a request that
        kills workers with the token after that is alone with one at last.
        """
        if self.num_losses <= 2:
            return self.num_losses == 2 and not self.num_clean_tokens
        return self.num_clean_tokens < CLEARING_TOKENS

    def reluctance(self, worker: str) -> int:
        """How little another loss on that worker would say: 0 where it was not lost before, 2 where it was the last."""
        return (worker in self.lost_on) + (worker == self.last_lost_on)

    def run(self, seconds: float, *, alone: bool) -> None:
        """The request was in flight for so long."""
        self.seconds += seconds
        if alone:
            self.seconds_alone += seconds

    def gain_token(self) -> None:
        """Hear of a token. With the last of CLEARING_TOKENS the row ends, and all but `num_looks` is forgotten."""
        if self.num_losses:
            self.num_clean_tokens += 1
            if self.num_clean_tokens >= CLEARING_TOKENS:
                self.__init__(num_looks=self.num_looks)  # type: ignore[misc]  # the group keeps this object
