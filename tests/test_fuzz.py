"""`make fuzz` finds what a few examples miss, keeps it and says how to see it again."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

TESTS = Path(__file__).parent
PROMISES = """
from hypothesis import given
from hypothesis import strategies as st

@given(st.integers())
def test_that_breaks(number):
    assert number < 1000

@given(st.integers())
def test_that_holds(number):
    assert number == number

def test_that_is_of_no_property():
    raise AssertionError
"""


@pytest.fixture
def promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYPOTHESIS_STORAGE_DIRECTORY", str(tmp_path / "hypothesis"))
    shutil.copy(TESTS / "conftest.py", tmp_path)
    file = tmp_path / "test_promises.py"
    file.write_text(PROMISES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    return file


def fuzz(*arguments: str, cores: int = 1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, TESTS / "fuzz.py", "--minutes", "0", "--cores", str(cores), *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)


def test_a_find_is_reported_kept_and_seen_again(promises: Path) -> None:
    ended = fuzz(f"{promises}::test_that_breaks")
    assert ended.returncode == 1, ended.stdout
    assert "number=1000" in ended.stdout
    assert "@reproduce_failure(" in ended.stdout
    assert list((promises.parent / "hypothesis" / "examples").rglob("*"))
    (again, *_) = (line for line in ended.stdout.splitlines() if line.startswith("again: "))
    seen = subprocess.run(
        again.removeprefix("again: "), shell=True, cwd=promises.parent, capture_output=True, text=True, timeout=300
    )
    assert "number=1000" in seen.stdout
    assert seen.returncode == pytest.ExitCode.TESTS_FAILED


def test_where_every_promise_holds_it_ends_well_once_the_time_is_over(promises: Path) -> None:
    ended = fuzz(str(TESTS / "core" / "blocks" / "test_block_manager.py"), cores=2)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("1 runs of 2 tests") == 2
    assert "nothing was found" in ended.stdout


def test_tests_that_cannot_be_read_are_no_success(promises: Path) -> None:
    promises.write_text("import nothing_of_this_name")
    ended = fuzz(str(promises))
    assert ended.returncode != 0
    assert "nothing_of_this_name" in ended.stdout


def test_outside_of_it_every_run_draws_the_same_examples() -> None:
    drawn: list[int] = []
    draw = given(st.integers())(lambda number: drawn.append(number))
    draw()
    first = drawn.copy()
    drawn.clear()
    draw()
    assert drawn == first
    assert len(set(drawn)) > 40
