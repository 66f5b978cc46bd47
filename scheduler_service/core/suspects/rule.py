"""Whether a request is what workers are lost to, or was only there when they were.

A request is ended when the chance that its losses were a coincidence is below one in a million. In the step that a
worker is lost in, any request may be the reason; so the evidence is of losses with nothing else in flight, and of the
time that the request had workers to itself. What is compared with it is the same fleet at the same time: all losses and
all seconds of serving workers since the request's first loss in which it was not in flight, whether those workers were
idle or computed others.

    n, t   losses of workers with this request alone in flight, and the seconds that it was alone in flight
    m, s   losses of workers without it, and the seconds that workers served without it

If the request is innocent, workers are lost in both kinds of time at one rate, which is unknown. Then each of the n + m
losses falls into the request's time with probability x = t / (t + s). The chance of n or more losses there is a tail of
the binomial distribution (the exact comparison of two Poisson rates; Przyborowski and Wilenski, 1940):

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
  without it for CONTROL times its own time, but no longer than MAX_CONTROL_SECONDS for each loss. So the third loss
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

from scheduler_service.core.groups.suspicion import Suspicion
from scheduler_service.core.placement.background import Background

CHANCE = 1e-6
FEWEST_ALONE = 3
CONTROL = 130
"""The third loss alone, if nothing else is lost, needs x^3 < CHANCE / 2, so x < 1/126."""
MAX_CONTROL_SECONDS = 30.0
NOTICE_SECONDS = 0.01


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


def lose(suspicion: Suspicion, background: Background, *, worker: str, seconds: float, now: float, alone: bool) -> bool:
    """A worker was lost with the request in flight, for so many seconds since the last answer.

    The background has that loss already. Returns whether coincidence is as good as excluded.
    """
    suspicion.num_losses += 1
    suspicion.num_clean_tokens = 0
    suspicion.lost_on |= {worker}
    suspicion.last_lost_on = worker
    if suspicion.num_losses == 1:
        suspicion.fleet_losses_before = background.num_losses
        suspicion.fleet_seconds_before = background.seconds(now)
        return False
    suspicion.run(seconds, alone=alone)
    if not alone:
        return False
    suspicion.seconds_alone += NOTICE_SECONDS
    suspicion.others_at_last = _seconds_of_others(suspicion, background, now)
    suspicion.num_alone += 1
    if suspicion.num_alone < FEWEST_ALONE:
        return False
    suspicion.num_looks += 1
    limit = CHANCE / (suspicion.num_looks * (suspicion.num_looks + 1))
    num_others = background.num_losses - suspicion.fleet_losses_before - (suspicion.num_losses - 1)
    return chance(suspicion.num_alone, suspicion.seconds_alone, num_others, suspicion.others_at_last) < limit


def missing_control(suspicion: Suspicion, background: Background, now: float) -> float:
    """For how many more seconds workers must serve without the request before it is tried alone again."""
    if suspicion.num_alone < FEWEST_ALONE - 1:
        return 0.0
    after_another = suspicion.seconds_alone * (suspicion.num_alone + 1) / suspicion.num_alone
    wanted = min(CONTROL * after_another, suspicion.others_at_last + MAX_CONTROL_SECONDS)
    return max(0.0, wanted - _seconds_of_others(suspicion, background, now))


def _seconds_of_others(suspicion: Suspicion, background: Background, now: float) -> float:
    return background.seconds(now) - suspicion.fleet_seconds_before - suspicion.seconds
