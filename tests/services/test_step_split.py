"""Where the time of steps goes: the arithmetic of round trips, and what a running scheduler tells of itself."""

import time
from types import SimpleNamespace

from cluster import cluster_state

from pagewire.v1.admin_service_pb2 import StepSplit as StepSplitMessage
from pagewire_client import Client, LocalServer, SamplingParams
from scheduler_service.engine.worker_link.session import RoundTrips, StepSplit

TIMING = SimpleNamespace(move_us=1, encode_us=3, forward_us=4, sample_us=2, guess_us=0)  # 10 µs in all


def test_the_wire_is_what_the_worker_did_not_need_of_a_round_trip() -> None:
    trips = RoundTrips(split := StepSplit())
    trips.sent(1_000)
    trips.answered(14_000, TIMING)
    assert (split.num_steps, split.move, split.images, split.forward) == (1, 1_000, 3_000, 4_000)
    assert split.wire == 3_000


def test_waiting_for_the_step_before_is_not_the_wires_time() -> None:
    trips = RoundTrips(split := StepSplit())
    for at in (0, 500):
        trips.sent(at)
    assert trips.num_in_flight == 2
    trips.answered(12_000, TIMING)
    trips.answered(22_300, TIMING)  # computed from 11,500 on or so: the way to the worker and back is hidden
    assert trips.num_in_flight == 0
    assert split.wire == 2_000 + 300


def test_an_answer_noticed_late_takes_its_delay_from_the_next() -> None:
    trips = RoundTrips(split := StepSplit())
    for at in (0, 0):
        trips.sent(at)
    trips.answered(15_000, TIMING)
    assert split.wire == 5_000
    trips.answered(21_000, TIMING)
    assert split.wire == 1_000


def test_idle_time_between_steps_belongs_to_none() -> None:
    trips = RoundTrips(split := StepSplit())
    trips.sent(0)
    trips.answered(11_000, TIMING)
    trips.sent(9_000_000)
    trips.answered(9_011_000, TIMING)
    assert split.wire == 2_000


async def test_the_admin_service_tells_where_the_time_of_steps_went(tiny_server: LocalServer) -> None:
    async def split() -> StepSplitMessage:
        (worker,) = (await cluster_state(tiny_server.admin_target)).workers
        return worker.step_split

    before, began = await split(), time.perf_counter()
    async with Client(tiny_server.target) as client:
        sampling = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        async for _ in client.generate([5, 6, 7], sampling):
            pass
    after, us_passed = await split(), 1e6 * (time.perf_counter() - began)
    spent = {field.name: getattr(after, field.name) - getattr(before, field.name) for field in after.DESCRIPTOR.fields}
    assert spent.pop("num_steps") >= 20
    assert spent.pop("move_us") >= 0
    assert spent.pop("guess_us") == 0  # this worker guesses nothing
    assert spent.pop("images_us") == 0
    assert all(us > 0 for us in spent.values()), spent
    in_flight = spent["wire_us"] + spent["forward_us"] + spent["sample_us"]
    assert in_flight <= us_passed + len(spent)  # each rounds down
