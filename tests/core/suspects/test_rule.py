"""The rule by which a request is ended: what its losses say, held against exact sums and against chance itself."""

from fractions import Fraction
from math import comb
from random import Random

import pytest

from scheduler_service.core.groups.suspicion import CLEARING_TOKENS, Suspicion
from scheduler_service.core.placement.background import Background
from scheduler_service.core.suspects import rule
from scheduler_service.core.suspects.rule import chance


@pytest.mark.parametrize("num_losses", [1, 2, 3, 7])
@pytest.mark.parametrize("num_others", [0, 1, 5, 40])
@pytest.mark.parametrize("share", [Fraction(1, 1000), Fraction(1, 50), Fraction(1, 3)])
def test_the_chance_is_a_tail_of_the_binomial_distribution(
    num_losses: int, num_others: int, share: Fraction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "CHANCE", 2.0)
    total = num_losses + num_others
    exact = sum(comb(total, k) * share**k * (1 - share) ** (total - k) for k in range(num_losses, total + 1))
    assert chance(num_losses, float(share), num_others, float(1 - share)) == pytest.approx(float(exact))


@pytest.mark.parametrize(("num_losses", "seconds", "num_others", "others"), [(5, 1.0, 0, 0.0), (0, 0.0, 9, 9.0)])
def test_without_time_of_others_or_losses_there_is_no_evidence(
    num_losses: int, seconds: float, num_others: int, others: float
) -> None:
    assert chance(num_losses, seconds, num_others, others) == 1.0


def test_many_losses_over_a_long_time_are_added_up_without_overflow() -> None:
    assert chance(10_000, 1000.0, 1_000_000, 100_000.0) >= rule.CHANCE
    assert chance(10_000, 10.0, 100_000, 100_000.0) < rule.CHANCE
    assert chance(1000, 1e-9, 0, 1e9) == 0.0


def lose(request: Suspicion, background: Background, now: float, seconds: float, *, alone: bool = True) -> bool:
    """One worker of the fleet is lost after so many seconds of a step with the request in it, and another one joins."""
    background.leave(now, is_lost=True)
    background.join(now)
    return rule.lose(request, background, worker=f"worker {now}", seconds=seconds, now=now, alone=alone)


def test_losses_in_company_are_no_evidence_however_many_they_are() -> None:
    background, request = Background(), Suspicion()
    for _ in range(4):
        background.join(0.0)
    assert not any(lose(request, background, 1000.0 * k, 0.01, alone=False) for k in range(1, 100))
    assert not any(lose(request, background, 100_000.0 + k, 0.01) for k in range(2))
    assert lose(request, background, 100_002.0, 0.01)


@pytest.mark.parametrize(("num_other_losses", "num_needed"), [(0, 3), (5, 4), (20, 5)])
def test_the_more_workers_are_lost_without_it_the_more_losses_it_takes(num_other_losses: int, num_needed: int) -> None:
    background, request = Background(), Suspicion()
    for _ in range(4):
        background.join(0.0)
    lose(request, background, 1.0, 0.01)
    for _ in range(num_other_losses):
        background.leave(2.0, is_lost=True)
        background.join(2.0)
    found = [lose(request, background, 5.0 + k, 0.01) for k in range(num_needed)]
    assert found == [False] * (num_needed - 1) + [True]


def test_workers_that_leave_in_good_order_are_time_without_losses() -> None:
    background = Background()
    background.join(1.0)
    background.join(2.0)
    background.leave(5.0, is_lost=False)
    assert (background.num_losses, background.seconds(7.0)) == (0, 5.0 + 4.0)
    background.leave(7.0, is_lost=True)
    assert (background.num_losses, background.seconds(100.0)) == (1, 9.0)


def test_a_request_that_gains_enough_tokens_begins_anew() -> None:
    background, request = Background(), Suspicion()
    background.join(0.0)
    for row in range(20):
        for k in range(3):
            assert not lose(request, background, 1000.0 * row + k, 0.01)
        for _ in range(CLEARING_TOKENS):
            assert request.is_grave
            request.gain_token()
        assert not request.is_grave
        assert not request.lost_on


def test_a_suspect_stays_alone_for_longer_after_each_loss() -> None:
    background, request = Background(), Suspicion()
    found: list[int] = []
    for number in range(4):
        background.join(0.0)
        lose(request, background, float(number), 0.01, alone=False)
        num_tokens = 0
        while request.is_grave:
            request.gain_token()
            num_tokens += 1
        found.append(num_tokens)
    assert found == [0, 1, CLEARING_TOKENS, 0]


@pytest.mark.parametrize("limit", [0.3, 0.03])
@pytest.mark.parametrize("rate", [0.02, 0.3, 3.0])
def test_the_share_of_innocent_requests_that_is_ended_is_below_the_limit(
    rate: float, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are lost at one rate whatever they compute, and each request is alone for a share of the time.

    The limit is raised to where its errors can be counted; one in a million works by the same sums.
    """
    monkeypatch.setattr(rule, "CHANCE", limit)
    random = Random(int(1000 * rate))
    num_requests, num_ended = 1000, 0
    for _ in range(num_requests):
        background, request = Background(), Suspicion()
        for _ in range(2):
            background.join(0.0)
        now, share, step = 0.0, random.choice([0.5, 0.1, 0.02]), random.choice([0.02, 0.5]) / rate
        lose(request, background, now, 0.0, alone=False)
        left, losses = random.expovariate(rate), 0  # of seconds of workers' time until the next loss
        while losses < 40:
            alone = random.random() < share
            length = step * random.uniform(0.5, 1.5)
            seconds = min(length, left)
            left -= seconds
            now += seconds / 2  # two workers serve; the other one's time and losses are in the next spells
            if left > 0.0:
                if alone:
                    request.run(seconds, alone=True)
                continue
            left = random.expovariate(rate)
            losses += 1
            if alone:
                if lose(request, background, now, seconds):
                    num_ended += 1
                    break
            else:
                background.leave(now, is_lost=True)
                background.join(now)
    assert num_ended <= limit * num_requests
    assert num_ended > 0
