"""Evidence that one request causes the loss of workers; suspects/rule.py judges it."""

from dataclasses import dataclass

CLEARING_TOKENS = 4
"""Tokens after which a loss no longer counts against a request. With more, all requests would run alone for long in a
storm of losses."""


@dataclass(slots=True)
class Suspicion:
    """The evidence since the first loss with the request in flight. Losses until CLEARING_TOKENS form a row."""

    num_losses: int = 0
    """Losses in the row."""
    num_alone: int = 0
    """Losses in the row, except the first, with no other request in flight."""
    lost_on: frozenset[str] = frozenset()
    """Workers that were lost in the row."""
    last_lost_on: str | None = None
    num_clean_tokens: int = 0
    """Tokens gained since the last loss."""
    seconds: float = 0.0
    """Seconds in flight on any worker since the first loss."""
    seconds_alone: float = 0.0
    """Seconds in flight without another request since the first loss."""
    fleet_losses_before: int = 0
    """Losses of the whole fleet up to and including the row's first."""
    fleet_seconds_before: float = 0.0
    """Seconds that the whole fleet had served at the row's first loss."""
    others_at_last: float = 0.0
    """Seconds that workers served without the request, from the row's first loss to the last solitary loss."""
    num_looks: int = 0
    """How often the rule was applied, in all rows together."""

    @property
    def is_grave(self) -> bool:
        """Whether the request must run alone: for one token after the second loss, and for CLEARING_TOKENS after each
        further loss."""
        if self.num_losses <= 2:
            return self.num_losses == 2 and not self.num_clean_tokens
        return self.num_clean_tokens < CLEARING_TOKENS

    def reluctance(self, worker: str) -> int:
        """How little another loss on that worker would prove: 0 not lost in this row, 1 lost, 2 lost last."""
        return (worker in self.lost_on) + (worker == self.last_lost_on)

    def run(self, seconds: float, *, alone: bool) -> None:
        """Count seconds in flight."""
        self.seconds += seconds
        if alone:
            self.seconds_alone += seconds

    def gain_token(self) -> None:
        """After CLEARING_TOKENS tokens the row ends, and everything except `num_looks` is reset."""
        if self.num_losses:
            self.num_clean_tokens += 1
            if self.num_clean_tokens >= CLEARING_TOKENS:
                # the group keeps a reference to this object
                self.__init__(num_looks=self.num_looks)  # type: ignore[misc]
