"""Evidence about one request: the workers that were lost with it in flight, and its seconds in flight.

The rule in suspects/rule.py judges this evidence.
"""

from dataclasses import dataclass

CLEARING_TOKENS = 4
"""Number of tokens after which a loss no longer counts against a request. A larger number would also find requests that
kill workers with their tenth token. In a storm of losses, however, a larger number would make all requests run alone
for long."""


@dataclass(slots=True)
class Suspicion:
    """The evidence about one request, from the first worker that was lost with the request in flight."""

    num_losses: int = 0
    """Number of losses in the row, which is a series of losses with the request in flight."""
    num_alone: int = 0
    """Number of solitary losses in the row of losses, except the row's first loss. At a solitary loss, no other request
    was in flight."""
    lost_on: frozenset[str] = frozenset()
    """Names of the workers that were lost in the row of losses."""
    last_lost_on: str | None = None
    """Name of the worker that was lost last."""
    num_clean_tokens: int = 0
    """Tokens that the request gained since the last loss."""
    seconds: float = 0.0
    """Seconds that the request was in flight on any worker since the first loss."""
    seconds_alone: float = 0.0
    """Seconds since the first loss in which only this request was in flight."""
    fleet_losses_before: int = 0
    """Number of losses of the whole fleet up to the first loss of the row, including this first loss."""
    fleet_seconds_before: float = 0.0
    """Seconds that the whole fleet had served at the first loss of the row."""
    others_at_last: float = 0.0
    """Seconds that workers served without the request, from the first loss of the row to the last solitary loss."""
    num_looks: int = 0
    """How often the rule in suspects/rule.py was applied to the request, in all rows of losses together."""

    @property
    def is_grave(self) -> bool:
        """Whether the request must be scheduled alone.

        After the second loss, the request must run alone for one token. After each further loss, the request must run
        alone for CLEARING_TOKENS tokens. Some requests crash a worker only after their first token. After
        enough lost workers, such a request runs alone too.
        """
        if self.num_losses <= 2:
            return self.num_losses == 2 and not self.num_clean_tokens
        return self.num_clean_tokens < CLEARING_TOKENS

    def reluctance(self, worker: str) -> int:
        """How little another loss on that worker would prove, as a number. 0: the worker was not lost with the request.
        1: the worker was lost in this row. 2: the worker was lost last."""
        return (worker in self.lost_on) + (worker == self.last_lost_on)

    def run(self, seconds: float, *, alone: bool) -> None:
        """Count seconds that the request was in flight."""
        self.seconds += seconds
        if alone:
            self.seconds_alone += seconds

    def gain_token(self) -> None:
        """Count a token. After CLEARING_TOKENS tokens the row of losses ends, and everything except `num_looks` is
        reset."""
        if self.num_losses:
            self.num_clean_tokens += 1
            if self.num_clean_tokens >= CLEARING_TOKENS:
                # the group keeps a reference to this object
                self.__init__(num_looks=self.num_looks)  # type: ignore[misc]
