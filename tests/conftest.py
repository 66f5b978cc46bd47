"""Settings that precede every import of a test module, and the tests of each process."""

import contextlib
import ctypes
import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    from hypothesis import settings
    from hypothesis.database import DirectoryBasedExampleDatabase
except ImportError:  # a GPU machine that runs the tests of kernels alone may not have it
    pass
else:
    # Examples follow from the test's code, so that a commit has one verdict. `make fuzz` draws others, twice as many,
    # and keeps failures. Without deadline, because an example's time depends on the machine.
    settings.register_profile(
        "pagewire", max_examples=50, deadline=None, derandomize=True, database=None, print_blob=True
    )
    storage = Path(os.environ.get("HYPOTHESIS_STORAGE_DIRECTORY", ".hypothesis"))
    found = DirectoryBasedExampleDatabase(storage / "examples")
    settings.register_profile("fuzz", deadline=None, derandomize=False, database=found, print_blob=True)
    settings.load_profile("pagewire")

# One thread for each process: several processes with a thread for each core would wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

# Several schedulers on one machine cannot all have the default port for operators.
os.environ["PAGEWIRE_ADMIN_LISTEN"] = "127.0.0.1:0"

# Most tests need no forms, whose process takes half a second to start.
os.environ["PAGEWIRE_FORMS"] = "false"

# A background process of a shell ignores SIGINT, and so would its children: tests that interrupt one would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Triton chooses its interpreter on import, also by transformers. Looking for a driver is faster than asking torch.
try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: no other process runs tests meanwhile, for it measures time")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from parallel import Groups

    config.option.loadscopereorder = False  # by the number of tests
    return Groups(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _draw_alike()
    if hasattr(config, "workerinput"):  # in one of several processes
        from parallel import longest_first

        items[:] = longest_first(items)


def pytest_collection_finish() -> None:
    """Imported objects stay, so the garbage collector need not visit them (3% of the time)."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # triton reports what is never collected


def _draw_alike() -> None:
    """Derive examples from the test's code alone.

    Hypothesis also draws constants of imported modules, which differ between processes and orders of tests. `make fuzz`
    draws them.
    """
    with contextlib.suppress(ImportError):
        from hypothesis import settings
        from hypothesis.internal.conjecture import providers

        if settings.default is not None and settings.default.derandomize:
            providers._get_local_constants = lambda: providers._local_constants


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the time limit begins
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    if not hasattr(item.config, "workerinput"):
        return (yield)
    from parallel import turns

    alone, next_alone = (test is not None and bool(test.get_closest_marker("alone")) for test in (item, nextitem))
    with turns.turn(alone=alone, next_alone=next_alone):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _forked_starts() -> Iterator[None]:
    """Fork services from a process that has already imported them, where forked.py can."""
    local = sys.modules.get("pagewire_client.local")  # any test that starts one has imported it by now
    if local is None or sys.platform != "linux" or os.environ.get("PAGEWIRE_TEST_TRUE_STARTS"):
        yield
        return
    from forked import ForkServers

    servers = ForkServers()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "start_process", servers.start)
        yield
    servers.close()


@pytest.fixture
def true_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start services by `python -m`."""
    from forked import true_start

    monkeypatch.setattr("pagewire_client.local.start_process", true_start)


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    """Random numbers without a seed are the same in every run."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
