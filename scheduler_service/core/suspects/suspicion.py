"""Whether a request is what workers are lost to, or was only there when they were.

A request is ended when the chance that its losses were a coincidence is below one in a million. In the step that a
worker is lost in, any request may be the reason; so the evidence is of losses with nothing else in flight, and of the
time that the request had workers to itself. What is compared with it is the same fleet at the same time: all losses and
all seconds of serving workers since the request's first loss in which it was not in flight, whether those workers were
idle or computed others.

    n, t   losses of workers with this request alone in flight, and the seconds that it was alone in flight
    m, s   losses of workers without it, and the seconds that workers served without it

If the request is innocent, workers are lost in both kinds of time at one rate, which is unknown. Then each of the n + m
losses falls into the request's time with probability x = t / (t + s), and the chance of n or more of them there is a
tail of the binomial distribution (the exact comparison of two Poisson rates; Przyborowski and Wilenski, 1940):

    chance(n, t, m, s) = P(Binomial(n + m, x) >= n) = sum over k <= m of C(n + k - 1, k) x^n (1 - x)^k

The uncertainty of the rate is in it: where m is 0 it says what a flat prior does, that a first loss of the others may
be near. The rate may be any, and may have changed when the request's losses began, as in a storm of kills after days
without any; it should not change much faster than the request comes to be alone and others do.

- The first loss of a row counts for nothing: it is what the row begins with. The row ends, and all of this is
  forgotten, when the request gains CLEARING_TOKENS without a loss.
- The chance is looked at after each loss alone, from the third of a row on: what fewer say is never enough in practice.
  For all these looks together to err less than once in a million requests, the k-th of a request's life, in whatever
  row, must find less than a millionth / (k (k + 1)). That is a bound for each request, not for all: of a million that
  live through storms of kills one may be ended.
- Without time of others nothing is evidence: a suspect that was lost alone twice waits until workers have served
  without it for CONTROL times its own time, but no longer than MOST_CONTROL_SECONDS for each loss. So the third loss
  alone is enough, if nothing else is lost meanwhile; if its own time is long, one of the next.
- A worker that was gone just before a step was sent is noticed in that step: NOTICE_SECONDS before it count as well.
  One that does not answer is lost later than it failed: of a step in flight no more seconds count, for the request and
  for the worker, than a sound worker might have needed, which is for the caller to say.
- So is what counts as a loss, which must be the same for both sides: sessions that break, time out or bring nonsense
  count; those that a worker or another scheduler ended in good order do not.

A request that kills every worker in its first step is found after four losses, or after five if it was in company in
the first two. Everything is a sum: a loss costs O(1) for each request in flight, and O(m) for one that was
alone.
"""

import math

CHANCE = 1e-6
CLEARING_TOKENS = 4
"""A request that gains so many tokens since a loss had nothing to do with it. More would find those that kill with
their tenth token as well, but in a storm it would have all requests run alone, for long."""
FEWEST_ALONE = 3
CONTROL = 130
"""The third loss alone, if nothing else is lost, needs x^3 < CHANCE / 2, so x < 1/126."""
MOST_CONTROL_SECONDS = 30.0
NOTICE_SECONDS = 0.01


class Background:
    """How many workers of a fleet were lost, and for how many seconds its workers have served, all together."""

    __slots__ = ("_num_serving", "_seconds", "num_losses")

    def __init__(self) -> None:
        self.num_losses = 0
        self._num_serving = 0
        self._seconds = 0.0  # when those that serve now are taken to have served since time 0

    def join(self, now: float) -> None:
        """A worker's session begins."""
        self._num_serving += 1
        self._seconds -= now

    def leave(self, now: float, *, is_lost: bool) -> None:
        """A worker's session is over."""
        self._num_serving -= 1
        self._seconds += now
        self.num_losses += is_lost

    def seconds(self, now: float) -> float:
        return self._seconds + self._num_serving * now

    def ahead(self, now: float, seconds: float) -> float:
        """When the fleet as it is now will have served for so many seconds more."""
        return now + seconds / max(1, self._num_serving)


def chance(num_losses: int, seconds: float, num_others: int, seconds_of_others: float) -> float:
    """P(Binomial(n + m, t / (t + s)) >= n): see above. What is no less than CHANCE is not added up to its end."""
    if num_losses == 0 or seconds_of_others <= 0.0:
        return 1.0
    share = seconds / (seconds + seconds_of_others)
    log_share, log_rest = math.log(share), math.log(seconds_of_others / (seconds + seconds_of_others))
    total = 0.0
    for k in range(num_others + 1):
        log_ways = math.lgamma(num_losses + k) - math.lgamma(num_losses) - math.lgamma(k + 1)
        total += math.exp(log_ways + num_losses * log_share + k * log_rest)
        if total >= CHANCE:
            break
    return total


class Suspicion:
    """The evidence about one request, from the first worker that was lost with it in flight.

    `num_losses` counts the losses of the row, `num_alone` those after the first with nothing else in flight, and
    `lost_on` names the workers.
    """

    __slots__ = (
        "_last_lost_on",
        "_num_clean_tokens",
        "_num_looks",
        "_others",
        "_others_at_last",
        "_seconds",
        "_seconds_alone",
        "_seconds_before",
        "lost_on",
        "num_alone",
        "num_losses",
    )

    def __init__(self) -> None:
        self._num_looks = 0
        self._clear()

    def _clear(self) -> None:
        self.num_losses = 0
        self.num_alone = 0
        self.lost_on: frozenset[str] = frozenset()
        self._last_lost_on: str | None = None
        self._num_clean_tokens = 0
        self._others = 0  # losses that the background had at the first of the row
        self._seconds_before = 0.0  # seconds that it had
        self._seconds = 0.0  # in flight since, on any worker
        self._seconds_alone = 0.0
        self._others_at_last = 0.0  # seconds of workers without it, at the last loss

    @property
    def is_grave(self) -> bool:
        """Whether the request is to be scheduled alone.

        After the second loss it must gain a token alone, after further ones as many as clear it: so a request that
        kills workers with the token after that is alone with one at last.
        """
        if self.num_losses <= 2:
            return self.num_losses == 2 and not self._num_clean_tokens
        return self._num_clean_tokens < CLEARING_TOKENS

    def lose(self, background: Background, worker: str, seconds: float, now: float, *, alone: bool) -> bool:
        """A worker was lost with the request in flight, for so many seconds since the last answer.

        The background has that loss already. Returns whether coincidence is as good as excluded.
        """
        self.num_losses += 1
        self._num_clean_tokens = 0
        self.lost_on |= {worker}
        self._last_lost_on = worker
        if self.num_losses == 1:
            self._others, self._seconds_before = background.num_losses, background.seconds(now)
            return False
        self.run(seconds, alone=alone)
        if not alone:
            return False
        self._seconds_alone += NOTICE_SECONDS
        self._others_at_last = self._seconds_of_others(background, now)
        self.num_alone += 1
        if self.num_alone < FEWEST_ALONE:
            return False
        self._num_looks += 1
        limit = CHANCE / (self._num_looks * (self._num_looks + 1))
        num_others = background.num_losses - self._others - (self.num_losses - 1)
        return chance(self.num_alone, self._seconds_alone, num_others, self._others_at_last) < limit

    def reluctance(self, worker: str) -> int:
        """How little another loss on that worker would say: 0 where it was not lost before, 2 where it was the last."""
        return (worker in self.lost_on) + (worker == self._last_lost_on)

    def run(self, seconds: float, *, alone: bool) -> None:
        """The request was in flight for so long."""
        self._seconds += seconds
        if alone:
            self._seconds_alone += seconds

    def gain_token(self) -> None:
        """Hear of a token."""
        if self.num_losses:
            self._num_clean_tokens += 1
            if self._num_clean_tokens >= CLEARING_TOKENS:
                self._clear()

    def missing_control(self, background: Background, now: float) -> float:
        """For how many more seconds workers must serve without the request before it is tried alone again."""
        if self.num_alone < FEWEST_ALONE - 1:
            return 0.0
        after_another = self._seconds_alone * (self.num_alone + 1) / self.num_alone
        wanted = min(CONTROL * after_another, self._others_at_last + MOST_CONTROL_SECONDS)
        return max(0.0, wanted - self._seconds_of_others(background, now))

    def _seconds_of_others(self, background: Background, now: float) -> float:
        return background.seconds(now) - self._seconds_before - self._seconds
