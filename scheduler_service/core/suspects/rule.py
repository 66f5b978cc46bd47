"""Decides whether a request causes the loss of workers, or was in flight by coincidence.

A request is ended if the chance of coincidence is below one in a million. Any request in a step can be the cause of its
loss, so the evidence is only the losses and the time with no other request in flight. The evidence is compared with the
fleet's losses and serving time, idle workers included, without the request since its first loss.

Let n be the losses with this request alone in flight in t seconds, and m the losses without it in s seconds. If the
request is innocent, each of the n + m losses falls into the t seconds with probability x = t / (t + s). The exact
comparison of two Poisson rates (Przyborowski and Wilenski, 1940) is a tail of the binomial distribution:

    P(Binomial(n + m, x) >= n) = sum over k <= m of C(n + k - 1, k) x^n (1 - x)^k.

The rate of losses can have any value, but must not change much faster than the request alternates with others.

Losses form a row until CLEARING_TOKENS tokens come without a loss. The first loss of a row is no evidence, because it
starts the row. The chance is computed after each loss with no other request in flight (a solitary loss), from the third
of a row on. The k-th chance in a request's life must be less than a millionth / (k (k + 1)), so that all chances
together end less than one of a million innocent requests.

After two solitary losses, a suspect waits until workers have served without it for CONTROL times its seconds alone, and
at most MAX_CONTROL_SECONDS after each loss. Otherwise there is nothing to compare.

The loss of a worker just before a step is sent is noticed in that step, so NOTICE_SECONDS before the step count too. Of
a step in flight count only the seconds that a sound worker might have needed. The caller decides which events are
losses: sessions that break, time out or send invalid answers, and not those that were ended in good order.

A request that kills every worker in its first step is ended after four losses, or after five if other requests were in
flight in the first two. A loss costs O(1) for each request in flight, and O(m) for a request alone.
"""

import math

from scheduler_service.core.groups.suspicion import Suspicion
from scheduler_service.core.placement.background import Background

CHANCE = 1e-6
FEWEST_ALONE = 3
CONTROL = 130
"""Seconds of serving without the request for each of its seconds alone. If no other worker is lost, the third solitary
loss requires x^3 < CHANCE / 2, so x < 1/126."""
MAX_CONTROL_SECONDS = 30.0
NOTICE_SECONDS = 0.01


def chance(num_losses: int, seconds: float, num_others: int, seconds_of_others: float) -> float:
    """P(Binomial(n + m, t / (t + s)) >= n), summed until CHANCE is reached."""
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
    """Record that a worker was lost with the request in flight. Returns whether a coincidence is practically excluded.

    `seconds` is the time that the worker may have computed its steps. `background` must count this loss already.
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
    """Seconds that workers must still serve without the request before it is tried alone again."""
    if suspicion.num_alone < FEWEST_ALONE - 1:
        return 0.0
    after_another = suspicion.seconds_alone * (suspicion.num_alone + 1) / suspicion.num_alone
    wanted = min(CONTROL * after_another, suspicion.others_at_last + MAX_CONTROL_SECONDS)
    return max(0.0, wanted - _seconds_of_others(suspicion, background, now))


def _seconds_of_others(suspicion: Suspicion, background: Background, now: float) -> float:
    return background.seconds(now) - suspicion.fleet_seconds_before - suspicion.seconds
