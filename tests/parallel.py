"""The process and the order of each test: the tests of a file run in one process and share its fixtures.

All of tests/fleet share their workers. Long tests begin first, so that processes end at about the same time. A test
marked `alone` has the machine to itself. (pytest-xdist 3.8 does not find its own group marks with pytest 9.2.)
"""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

LONGEST = (
    "tests/kernels/test_triton_compiles.py",
    "tests/services/test_default_model.py",
    "tests/worker/parallel/test_ranks.py",
    "tests/worker/models/test_perplexity.py",
    "tests/fleet",
    "tests/worker/models/test_config_sweep.py",
    "tests/services/test_encoder_decoder.py",
    "tests/kernels/test_attention_by_position.py",
    "tests/worker/execution/test_forms.py",
    "tests/services/test_scheduler_loss.py",
    "tests/worker/models/test_architectures.py",
    "tests/kernels/test_triton_attention.py",
    "tests/services/test_watchdog.py",
    "tests/worker/loading/test_repository_code.py",
    "tests/services/test_front_ends.py",
    "tests/kernels/test_triton_sampling.py",
    "tests/services/test_processes.py",
    "tests/services/test_speculation.py",
    "tests/core/suspects/test_suspects.py",
    "tests/services/test_tensor_parallel.py",
    "tests/services/test_lora_requests.py",
    "tests/services/test_text_calls.py",
    "tests/worker/serving/test_worker_process.py",
    "tests/kernels/test_triton_layers.py",
    "tests/services/test_front_end_isolation.py",
    "tests/services/test_embedding.py",
    "tests/worker/serving/test_taken_adapters.py",
    "tests/worker/serving/test_rank_processes.py",
)
"""Groups by time, the longest first, but those with single tests of 20 seconds before the fleet's: a test that is to be
alone waits for the end of another's.
"""
_GATE, _MACHINE = Path(__file__), Path(__file__).with_name("conftest.py")
"""Files that every process finds, for their locks."""


class Groups(LoadScopeScheduling):
    """Gives a process another group of tests when it is nearly done with one."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """The file of a test, or the folder whose files share fixtures."""
    file = nodeid.partition("::")[0]
    return "tests/fleet" if file.startswith("tests/fleet/") else file


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests of LONGEST in front, otherwise in order."""
    places = {group: place for place, group in enumerate(LONGEST)}
    return sorted(items, key=lambda item: places.get(group_of(item.nodeid), len(places)))


class Turns:
    """When this process may run a test."""

    def __init__(self) -> None:
        self._held = ExitStack()
        self._is_kept = False

    @contextmanager
    def turn(self, *, alone: bool, next_alone: bool = False) -> Iterator[None]:
        """Let other processes run tests too, unless `alone`; waits until that is so.

        A row of tests that are each alone has one turn, so that the others are waited for only once.
        """
        if not self._is_kept:
            self._held.enter_context(_locked(alone=alone))
        self._is_kept = alone and next_alone
        try:
            yield
        finally:
            if not self._is_kept:
                self._held.close()


turns = Turns()


@contextmanager
def _locked(*, alone: bool) -> Iterator[None]:
    with open(_GATE) as gate, open(_MACHINE) as machine:
        fcntl.flock(gate, fcntl.LOCK_EX)  # no test begins while one waits to be alone
        fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
