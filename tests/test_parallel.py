"""Several processes run the tests: what belongs together stays so, and a test that measures has the machine."""

import fcntl
from pathlib import Path

import pytest

parallel = pytest.importorskip("parallel", exc_type=ImportError)  # it needs pytest-xdist
TESTS = Path(__file__).parent


def test_a_files_tests_are_one_group_and_the_fleets_too() -> None:
    ids = ["tests/a/test_b.py::test_c[x::y]", "tests/a/test_b.py::TestD::runTest", "tests/fleet/test_e.py::test_f"]
    assert [parallel.group_of(test) for test in ids] == ["tests/a/test_b.py", "tests/a/test_b.py", "tests/fleet"]


def test_the_longest_groups_are_there_and_begin_first(request: pytest.FixtureRequest) -> None:
    assert all((TESTS.parent / group).exists() for group in parallel.LONGEST)
    items = list(request.session.items)
    places = [parallel.group_of(item.nodeid) for item in parallel.longest_first(items)]
    longest = [place for place in dict.fromkeys(places) if place in parallel.LONGEST]
    assert list(dict.fromkeys(places))[: len(longest)] == longest == sorted(longest, key=parallel.LONGEST.index)


@pytest.mark.parametrize("alone", [False, True])
def test_a_test_that_is_alone_keeps_others_from_beginning(
    alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_GATE", "_MACHINE"):
        (tmp_path / name).touch()
        monkeypatch.setattr(parallel, name, tmp_path / name)

    def can_begin(*, alone: bool) -> bool:
        with open(tmp_path / "_MACHINE") as machine:
            try:
                fcntl.flock(machine, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    turns = parallel.Turns()
    with turns.turn(alone=alone, next_alone=True):
        assert can_begin(alone=False) is not alone
        assert not can_begin(alone=True)
    assert can_begin(alone=True) is not alone  # the next one to be alone goes on with this one's turn
    with turns.turn(alone=alone):
        assert can_begin(alone=False) is not alone
    assert can_begin(alone=True)
