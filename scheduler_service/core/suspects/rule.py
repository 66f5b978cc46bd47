"""Decides whether a request causes the loss of workers, or was in flight by coincidence.

A request is ended if the chance that its losses are a coincidence is below one in a million. If a worker is lost in a
step, any request in the step can be the cause. The evidence against a request is therefore only the losses and the time
with no other request in flight. The evidence is compared with the losses and the serving time of the whole fleet while
the request was not in flight. The comparison covers the time from the request's first loss on. Workers that are idle
count as serving, like workers that compute other requests.

Let n be the number of losses with this request alone in flight, and t the seconds that it was alone in flight. Let m be
the number of losses without the request in flight, and s the seconds that workers served without it. If the request is
innocent, workers are lost at the same unknown rate with and without it. For an innocent request, each of the n + m
losses falls into the request's time t with probability x = t / (t + s). The chance of n or more losses in the time t is
a tail of the binomial distribution. This test is the exact comparison of two Poisson rates (Przyborowski and Wilenski,
1940). The function `chance` computes this tail:

    P(Binomial(n + m, x) >= n) = sum over k <= m of C(n + k - 1, k) x^n (1 - x)^k.

The computed chance includes the uncertainty of the rate of losses. If m is 0, the chance is the same as under a flat
prior for the rate, which expects a loss without the request soon. The rate of losses can have any value. The rate of
losses may also have changed when the request's losses began, as in a storm of kills after quiet days. The test only
requires that the rate of losses does not change much faster than the request alternates with other requests.

A row is a series of losses with the request in flight. The first loss of a row is no evidence, because it starts the
row. If the request gains CLEARING_TOKENS tokens without a loss, the row ends and its evidence is forgotten.

A loss counts as solitary if no other request was in flight. The chance is computed after each solitary loss, from the
third solitary loss of a row on. Two solitary losses are never enough to end a request in practice. The k-th chance that
is computed in a request's life must be less than a millionth / (k (k + 1)). With this limit, all chances that are
computed for one request together end less than one of a million innocent requests. The limit of one in a million holds
for each request, not for all requests together. If a million requests live through storms of kills, one of them may be
ended wrongly.

Without serving time of other requests, there is nothing to compare a suspect's losses with. After two solitary losses,
a suspect waits until workers have served without it for CONTROL times the seconds that the suspect was alone in flight.
A suspect waits for at most MAX_CONTROL_SECONDS of such serving time after each loss. After the wait for serving time,
the suspect is ended at its third solitary loss if no other worker is lost meanwhile. A suspect that was alone in flight
for a long time is ended only at a later solitary loss.

The loss of a worker just before a step is sent is noticed in that step, so the NOTICE_SECONDS before the step count as
well. A worker that does not answer has failed some time before it counts as lost. Of a step in flight, only the seconds
that a sound worker might have needed count, both for the request and for the worker. The caller determines these
seconds of a step in flight.

The caller also decides which events count as the loss of a worker. The same kinds of events must count as losses with
and without the request in flight. Sessions that break, time out or send invalid answers count as losses. Sessions that
a worker or another scheduler ended in good order do not count as losses.

A request that kills every worker in its first step is ended after four losses. If other requests were in flight in the
first two losses, the request is ended after five losses. All evidence is stored as sums of losses and of seconds. The
computation after a loss costs O(1) for each request in flight, and O(m) for a request that was alone in flight.
"""

import math

from scheduler_service.core.groups.suspicion import Suspicion
from scheduler_service.core.placement.background import Background

CHANCE = 1e-6
FEWEST_ALONE = 3
CONTROL = 130
"""Seconds that workers must serve without the request, for each second that the request was alone in flight. If no
other worker is lost, the third solitary loss requires x^3 < CHANCE / 2, so x < 1/126."""
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
    """Record that a worker was lost with the request in flight. `seconds` is the time that the lost worker may have
    computed its steps in flight.

    `background` must count this loss already. Returns whether a coincidence is practically excluded.
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
