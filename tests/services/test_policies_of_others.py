"""Scheduling policies of other packages."""

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from random import Random
from typing import Any

import pytest
from recorded_workload import record

from pagewire_common.settings import load_settings
from scheduler_service import policies
from scheduler_service.core import FairQueue, PriorityQueue, SequenceGroup, WaitingQueue
from scheduler_service.recording.format import RecordingError
from scheduler_service.recording.replayer import Replayer
from scheduler_service.settings import SchedulerSettings
from scheduler_service.simulate import parse_arguments


class ByNumber(PriorityQueue):
    """A policy that a package might add."""


class Forgetful(WaitingQueue):
    def put_back(self, groups: Any) -> None:
        """Loses preempted requests."""


class Deaf(WaitingQueue):
    def upcoming(self, most: int, **_: Any) -> list[SequenceGroup]:
        return list(reversed(self._groups.values()))[:most]


class Silent(WaitingQueue):
    def append(self, group: SequenceGroup) -> None:
        raise RuntimeError("no")


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "others", sys.modules[__name__])
    names = ("ByNumber", "Forgetful", "Deaf", "Silent", "Path", "Missing")
    found = EntryPoints(EntryPoint(name.lower(), f"others:{name}", policies.GROUP) for name in names)
    monkeypatch.setattr(policies, "entry_points", lambda group: found.select(group=group))
    policies.policy_class.cache_clear()


@pytest.mark.parametrize("policy", [WaitingQueue, PriorityQueue, FairQueue, ByNumber])
def test_good_policies_pass_the_trial(policy: type[WaitingQueue]) -> None:
    assert policies.find_fault(policy) == ""


def test_a_policy_of_another_package_is_chosen_by_its_name() -> None:
    settings = load_settings(SchedulerSettings, "tests", ["--workers", "w:1", "--scheduling-policy", "bynumber"])
    assert type(policies.waiting_queue(settings.scheduling_policy)) is ByNumber
    assert policies.policy_class("bynumber").reads_priority
    arguments = parse_arguments(["--trace", "a.csv", "--scheduling-policy", "bynumber"])
    assert arguments.scheduling_policy == ["bynumber"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("forgetful", "others:Forgetful, which loses or invents requests in len, iteration or `in` after put_back"),
        ("deaf", "others:Deaf, which has another head than the first request of upcoming after append"),
        ("silent", "others:Silent, which failed in a trial: RuntimeError('no')"),
        ("path", "others:Path, which is no subclass of scheduler_service.core.WaitingQueue"),
        ("missing", "others:Missing, which cannot be imported: AttributeError"),
        ("lottery", "'lottery' is no policy; there are fcfs, priority, fair, bynumber, deaf, forgetful"),
    ],
)
def test_a_policy_that_cannot_be_used_ends_the_start(name: str, sentence: str) -> None:
    with pytest.raises(SystemExit, match="--scheduling-policy") as caught:
        load_settings(SchedulerSettings, "tests", ["--workers", "w:1", "--scheduling-policy", name])
    assert sentence in str(caught.value)


def test_a_recording_names_the_policy_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "a", Random(1), policy="bynumber")
    replayer = Replayer()
    assert len(list(replayer.run(tmp_path / "a"))) == replayer.num_events > 1
    assert replayer.header.policy_name == "bynumber"
    monkeypatch.setattr(policies, "entry_points", lambda group: EntryPoints())
    policies.policy_class.cache_clear()
    with pytest.raises(RecordingError, match="'bynumber' is no policy; there are fcfs, priority, fair"):
        list(Replayer().run(tmp_path / "a"))
