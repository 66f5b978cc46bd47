"""Decides whether a request causes the loss of workers, or was in flight by coincidence.

A request is ended if the chance that its losses are a coincidence is below one in a million. If a worker is lost in a
step, any request in the step can be the cause. So the evidence is the losses with no other request in flight, and the
time that the request was alone in flight. The evidence is compared with the losses and the serving time of the whole
fleet while the request was not in flight. The comparison begins with the request's first loss. Workers that are idle
count as serving, like workers that compute other requests.

Let n be the number of losses with this request alone in flight, and t the seconds that it was alone in flight. Let m be
the number of losses without it, and s the seconds that workers served without it. If the request is innocent, workers
are lost at the same unknown rate with and without it. In this case, each of the n + m losses falls into the request's
time with probability x = t / (t + s). The chance of n or more losses in the request's time is a tail of the binomial
distribution. This test is the exact comparison of two Poisson rates (Przyborowski and Wilenski, 1940). The function
`chance` computes the tail:

    P(Binomial(n + m, x) >= n) = sum over k <= m of C(n + k - 1, k) x^n (1 - x)^k.

The chance includes the uncertainty of the rate. If m is 0, the chance equals the result of a flat prior, for which the
first loss without the request may be near. The rate of losses can have any value. The rate may also have changed when
the request's losses began, as in a storm of kills after quiet days. But the rate should not change much faster than the
request alternates with other requests.

A row is a series of losses with the request in flight. The first loss of a row does not count, because it starts the
row. If the request gains CLEARING_TOKENS tokens without a loss, the row ends and its evidence is forgotten.

A loss counts as solitary if no other request was in flight. The chance is computed after each solitary loss, from the
third solitary loss of a row on. Two solitary losses are never enough in practice. The k-th chance that is computed in a
request's life must be less than a millionth / (k (k + 1)). With this limit, all chances that are computed for a request
err together in less than one of a million requests. The limit of one in a million holds for each request, not for all
requests together. If a million requests live through storms of kills, one of them may be ended.

Without serving time of other requests there is no evidence. After two solitary losses, a suspect waits until workers
have served without it for CONTROL times the suspect's own time. A suspect waits at most MAX_CONTROL_SECONDS for each
loss. After the wait, the third solitary loss is enough if no other worker is lost meanwhile. If the request's own time
is long, a later solitary loss is enough.

If a worker is gone just before a step is sent, the loss is noticed in that step. So the NOTICE_SECONDS before the step
count as well. If a worker does not answer, the failure happens earlier than the worker counts as lost. So a step in
flight counts only the seconds that a sound worker might have needed, for the request and for the worker. The caller
determines the seconds of a step in flight.

The caller also decides which events count as a loss. The same events must count with and without the request. Sessions
that break, time out or send nonsense count. Sessions that a worker or another scheduler ended in good order do not
count.

A request that kills every worker in its first step is found after four losses. If other requests were in flight in the
first two losses, the request is found after five losses. All evidence is stored as sums. The computation after a loss
costs O(1) for each request in flight, and O(m) for a request that was alone in flight.
"""

import math

from scheduler_service.core.groups.suspicion import Suspicion
from scheduler_service.core.placement.background import Background

CHANCE = 1e-6
FEWEST_ALONE = 3
CONTROL = 130
"""Seconds of serving without the request that are required for each second with it. If no other worker is lost, the
third solitary loss requires x^3 < CHANCE / 2, so x < 1/126."""
MAX_CONTROL_SECONDS = 30.0
NOTICE_SECONDS = 0.01


def chance(num_losses: int, seconds: float, num_others: int, seconds_of_others: float) -> float:
    """The chance that the module's docstring explains: P(Binomial(n + m, t / (t + s)) >= n). The computation stops when
    the sum reaches CHANCE."""
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
    """Record that a worker was lost with the request in flight, `seconds` after the last answer.

    The background must contain this loss already. Returns whether coincidence is practically excluded.
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
    """Seconds that workers must still serve without the request before the request is tried alone again."""
    if suspicion.num_alone < FEWEST_ALONE - 1:
        return 0.0
    after_another = suspicion.seconds_alone * (suspicion.num_alone + 1) / suspicion.num_alone
    wanted = min(CONTROL * after_another, suspicion.others_at_last + MAX_CONTROL_SECONDS)
    return max(0.0, wanted - _seconds_of_others(suspicion, background, now))


def _seconds_of_others(suspicion: Suspicion, background: Background, now: float) -> float:
    return background.seconds(now) - suspicion.fleet_seconds_before - suspicion.seconds
