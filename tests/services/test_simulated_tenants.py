"""Tenants and priorities of a simulated trace: how they are dealt out, how fairness is measured, what policies do."""

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core import FairQueue, PriorityQueue, WaitingQueue
from scheduler_service.simulation.cost_model import CostModel
from scheduler_service.simulation.fairness import ServiceGap
from scheduler_service.simulation.senders import deal
from scheduler_service.simulation.simulator import Result, Simulator
from scheduler_service.simulation.summary import summarise, ttft
from scheduler_service.simulation.trace import Arrival

COSTS = CostModel(num_device_blocks=256, num_host_blocks=256, max_num_seqs=16)
TENANTS = {"heavy": 8.0, "light": 1.0, "lighter": 0.5}
OVERLOAD = [Arrival(number * 0.05, 100 + number * 37 % 300, 1 + number * 7 % 60) for number in range(300)]


def simulate(queue: WaitingQueue, *, num_workers: int = 1) -> Result:
    arrivals = deal(OVERLOAD, TENANTS, {0: 9, -100: 1})
    return Simulator(arrivals, COSTS, num_workers=num_workers, waiting=queue).run()


def p99_of_tenants(result: Result, *tenants: str) -> float:
    return ttft([request for request in result.requests if request.arrival.tenant in tenants])["p99"]


def p99_of_priority(result: Result, priority: int) -> float:
    return ttft([request for request in result.requests if request.arrival.priority == priority])["p99"]


def test_shares_are_dealt_out_as_asked_and_the_same_every_time() -> None:
    dealt = deal(OVERLOAD * 10, TENANTS, {0: 3, -1: 1})
    assert dealt == deal(OVERLOAD * 10, TENANTS, {0: 3, -1: 1})
    tenants = Counter(arrival.tenant for arrival in dealt)
    assert [tenants[name] / len(dealt) for name in TENANTS] == pytest.approx([8 / 9.5, 1 / 9.5, 0.5 / 9.5], rel=0.2)
    urgent = Counter(arrival.tenant for arrival in dealt if arrival.priority)
    assert all(urgent[name] / tenants[name] == pytest.approx(0.25, rel=0.2) for name in TENANTS)


def test_priorities_do_not_depend_on_the_tenants() -> None:
    priorities = {0: 1.0, 5: 1.0}
    few, many = (deal(OVERLOAD, tenants, priorities) for tenants in ({"": 1.0}, TENANTS))
    assert [arrival.priority for arrival in few] == [arrival.priority for arrival in many]


def test_service_counts_prompts_once_and_output_twice_while_both_wait() -> None:
    gap = ServiceGap()
    gap.arrived("a")
    gap.admitted("a", 1000)  # b has nothing to claim yet
    for tenant in ("a", "a", "b", "b"):
        gap.arrived(tenant)
    gap.admitted("a", 100)
    for _ in range(10):
        gap.generated("a")
    gap.end_step()
    assert gap.tokens == 120
    gap.admitted("b", 110)
    gap.end_step()
    assert gap.tokens == 120  # b has caught up
    gap.admitted("b", 500)
    assert gap.tokens == 120 + 490  # counted before b's last request leaves the queue
    gap.admitted("a", 5000)
    gap.end_step()
    assert gap.tokens == 120 + 490  # b claims nothing any more


@given(st.lists(st.tuples(st.sampled_from(["arrived", "admitted", "generated"]), st.sampled_from("abc")), max_size=40))
def test_the_gap_is_the_largest_of_all_spans_in_which_two_tenants_wait(events: list[tuple[str, str]]) -> None:
    gap = ServiceGap()
    waiting: Counter[str] = Counter()
    service: Counter[str] = Counter()
    history: list[tuple[set[str], Counter[str]]] = []
    for number, (event, tenant) in enumerate(events):
        if event == "arrived":
            gap.arrived(tenant)
            waiting[tenant] += 1
        elif event == "generated":
            gap.generated(tenant)
            service[tenant] += 2
        elif waiting[tenant]:
            gap.admitted(tenant, number + 1)
            waiting[tenant] -= 1
            service[tenant] += number + 1
        gap.end_step()
        history.append((set(+waiting), service.copy()))
    largest = 0
    for one, other in combinations("abc", 2):
        for begin, (_, before) in enumerate(history):
            for waits, after in history[begin:]:
                largest = max(largest, abs(after[one] - before[one] - after[other] + before[other]))
                if not {one, other} <= waits:
                    break  # a span may end when a tenant stops waiting, but not begin there
    assert gap.tokens == largest


def test_fairness_is_for_light_tenants_what_priority_is_for_urgent_requests() -> None:
    fcfs, priority, fair = (simulate(queue) for queue in (WaitingQueue(), PriorityQueue(), FairQueue()))
    assert p99_of_tenants(fair, "light", "lighter") < p99_of_tenants(fcfs, "light", "lighter") / 4
    assert p99_of_tenants(fair, "heavy") < 1.5 * p99_of_tenants(fcfs, "heavy")
    assert p99_of_priority(priority, -100) < p99_of_priority(fcfs, -100) / 4
    assert p99_of_priority(priority, 0) < 1.5 * p99_of_priority(fcfs, 0)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_under_the_fair_policy_the_gap_stays_within_the_bound_of_its_paper(num_workers: int) -> None:
    """Twice the larger of the longest prompt and what full pools can generate; without the policy nothing bounds it."""
    longest_prompt = max(arrival.prompt_tokens for arrival in OVERLOAD)
    bound = 2 * max(longest_prompt, 2 * num_workers * COSTS.num_device_blocks * COSTS.block_size)
    fair, fcfs = (simulate(queue, num_workers=num_workers).service_gap for queue in (FairQueue(), WaitingQueue()))
    assert 0 < fair < bound
    assert fcfs > 10 * fair


def test_tenants_and_priorities_are_told_apart_only_where_there_are_several() -> None:
    assert {"ttft_by_tenant", "ttft_by_priority", "service_gap_tokens"} <= set(summarise(simulate(FairQueue())))
    alone = summarise(Simulator(OVERLOAD[:5], COSTS, num_workers=1).run())
    assert not {"ttft_by_tenant", "ttft_by_priority", "service_gap_tokens"} & set(alone)
