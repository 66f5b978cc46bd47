"""When a waiting group is left to a worker that holds its prefix, and which one that is."""

from placement_helpers import ROOMY, add, answer, left, make_fleet, reasons, taken, unlike, warm
from scheduler_helpers import make_group, make_scheduler

from scheduler_service.core import PlacementReason, WaitingQueue
from scheduler_service.core.blocks.allocator import PrefixDirectory


def test_a_group_is_left_to_the_worker_that_holds_its_prefix() -> None:
    other, holder = fleet = make_fleet(2)
    warm(holder, make_group("first", 100))
    add(fleet, make_group("again", 120))
    output = other.schedule()
    assert left(output) == {"again": holder}
    assert reasons(output) == {"again": PlacementReason.AFFINITY}
    (placement,) = holder.schedule().placements
    assert (placement.to, placement.reason, placement.cached_tokens) == (None, PlacementReason.AFFINITY, 100)


def test_the_longest_prefix_wins_among_those_that_hold_some() -> None:
    none, short, long = fleet = make_fleet(3)
    warm(short, make_group("short", 40))
    warm(long, make_group("long", 80))
    add(fleet, make_group("again", 120))
    assert left(none.schedule()) == {"again": long}
    assert left(short.schedule()) == {"again": long}
    assert taken(long.schedule()) == ["again"]


def test_only_blocks_in_a_row_are_a_prefix() -> None:
    directory, keys = PrefixDirectory(), [b"0", b"1", b"2", b"3"]
    for bit, held in ((1, "01"), (2, "0123"), (4, "013"), (8, "123"), (16, "0123")):
        for name in held:
            directory.add(name.encode(), bit)
    assert directory.holders(keys, 0, 0b1111) == 0b10
    assert directory.holders(keys, 0, 0b11111) == 0b10010
    assert directory.holders(keys, 0, 0b0101) == 0b0101
    assert directory.holders(keys, 1, 0b1101) == 0b1000
    assert directory.holders(keys, 0, 0b1000) == 0
    assert directory.holders(keys, 4, 0b1111) == 0


def test_a_prefix_does_not_outweigh_much_more_to_do() -> None:
    other, holder = fleet = make_fleet(2)
    warm(holder, make_group("first", 20))
    other.set_admission(False)
    add(fleet, *(unlike(str(i), max_tokens=100) for i in range(4)))
    holder.schedule()
    other.set_admission(True)
    add(fleet, make_group("again", 24))
    assert left(holder.schedule()) == {"again": other}
    assert taken(other.schedule()) == ["again"]


def test_of_several_that_hold_the_prefix_the_one_with_less_to_do_is_better() -> None:
    first, second = fleet = make_fleet(2)
    warm(first, make_group("first", 100))
    warm(second, make_group("second", 100))
    second.set_admission(False)
    add(fleet, unlike("other"))
    first.schedule()
    second.set_admission(True)
    add(fleet, make_group("again", 120))
    assert left(first.schedule()) == {"again": second}
    assert taken(second.schedule()) == ["again"]


def test_a_prefix_that_was_evicted_attracts_no_group() -> None:
    other, holder = fleet = make_fleet(2, num_device_blocks=30, max_model_len=120)
    warm(holder, make_group("first", 100))
    warm(holder, unlike("evicts", 119))
    add(fleet, make_group("again", 110))
    assert holder.blocks.cache.num_cached_tokens(make_group("like", 110).live[0]) == 0
    output = other.schedule()
    assert PlacementReason.AFFINITY not in reasons(output).values()


def test_a_worker_that_looks_past_a_group_takes_those_after_it() -> None:
    other, holder = fleet = make_fleet(2)
    warm(holder, make_group("first", 600))
    add(fleet, make_group("again", 700), *(unlike(str(i), 4) for i in range(2)))
    output = other.schedule()
    assert left(output)["again"] is holder
    assert taken(output)[0] == "0"
    assert fleet[0].waiting.get("again").placement.num_overtaken == len(taken(output))


def test_a_drained_worker_is_left_nothing_and_gets_it_back() -> None:
    other, holder = fleet = make_fleet(2)
    warm(holder, make_group("first", 100))
    holder.set_admission(False)
    add(fleet, make_group("again", 120))
    assert taken(other.schedule()) == ["again"]
    holder.set_admission(True)
    add(fleet, make_group("third", 99))
    assert left(other.schedule()) == {"third": holder}


def test_a_lost_worker_is_left_nothing_and_its_prefixes_are_forgotten() -> None:
    other, holder = fleet = make_fleet(2)
    warm(holder, make_group("first", 100))
    assert len(other.balancer.directory) == 25
    add(fleet, make_group("again", 120))
    assert left(other.schedule()) == {"again": holder}
    holder.release_all()
    assert len(other.balancer.directory) == 0
    output = other.schedule()
    assert reasons(output) == {"again": PlacementReason.ALONE}
    another = make_scheduler(other.waiting, **ROOMY)
    assert another.member.slot == holder.member.slot
    assert len(other.balancer) == 2


def test_workers_that_nothing_tells_apart_are_no_error() -> None:
    """Two hold the same prefix, have nothing to do, and had no room when they were asked last."""
    waiting = WaitingQueue()
    holders = [
        make_scheduler(waiting, num_device_blocks=6, max_num_seqs=4, max_model_len=24),
        make_scheduler(waiting, num_device_blocks=6, max_num_seqs=4, max_model_len=24),
    ]
    third = make_scheduler(waiting, num_device_blocks=40, max_num_seqs=4, max_model_len=24)
    for holder in holders:
        for scheduler in (*holders, third):
            scheduler.set_admission(scheduler is holder)
        waiting.append(make_group(f"fill {holder.member.slot}", 20, root=b"p", max_tokens=3))
        for _ in range(2):
            answer(holder, holder.schedule(), 0.0)
    for scheduler in (*holders, third):
        scheduler.set_admission(True)
    waiting.append(make_group("other", 20, root=b"z", max_tokens=2))
    assert taken(third.schedule()) == ["other"]
    for holder in holders:
        answer(holder, holder.schedule(), 0.0)
        assert not holder.running
    assert [holder.member.entry for holder in holders] == [-1, -1]
    waiting.append(make_group("same prefix", 20, root=b"p", max_tokens=2))
    assert list(left(third.schedule())) == ["same prefix"]
