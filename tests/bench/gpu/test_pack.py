"""The commands, without a network: wheels that were downloaded before are taken."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bench.gpu import make, pack
from bench.gpu.inventory import Inventory
from bench.gpu.make import newest
from bench.gpu.pack import ASSUMED, main
from bench.gpu.resolve import Plan

ROOT = Path(__file__).parents[3]


def wheel(folder: Path, name: str, version: str) -> Path:
    file = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}/__init__.py", f"VERSION = '{version}'\n")
        archive.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\nVersion: {version}\n")
    return file


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["pack", *map(str, arguments)])
    main()


def test_an_inventory_needs_nothing_but_python_and_can_be_read_again(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", "-c", "import runpy, sys; sys.path.insert(0, '.'); "
               "sys.argv[1:] = ['inventory']; runpy.run_module('bench.gpu.pack', run_name='__main__')"]  # fmt: skip
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=os.environ).stdout
    (tmp_path / "there.json").write_text(printed)
    found = Inventory.read(tmp_path / "there.json")
    assert found.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert found.packages.keys() <= {"pagewire"}  # which is installed from where the command runs
    assert Inventory.of_this_machine().packages["pytest"] == pytest.__version__


def test_the_assumed_machine_is_an_inventory() -> None:
    machine = Inventory.read(ASSUMED)
    assert (machine.python, machine.packages["torch"]) == ("3.12", "2.11.0")


@pytest.mark.parametrize("content", ["[]", "{}", '{"python": 3, "machine": "a", "glibc": "2.3", "packages": {}}', "x"])
def test_a_file_that_is_no_inventory_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=r"x\.json is not what `pack inventory` prints"):
        Inventory.read(tmp_path / "x.json")


def test_the_newest_downloaded_wheel_that_fits_is_taken_again(tmp_path: Path) -> None:
    older, newer = wheel(tmp_path, "web", "1.9"), wheel(tmp_path, "web", "1.10")
    wheel(tmp_path, "web", "2.0")
    wheel(tmp_path, "webs", "1.11")
    assert newest(tmp_path, Requirement("web<2")) == newer
    assert newest(tmp_path, Requirement("web<1.10")) == older
    assert newest(tmp_path, Requirement("web>2")) is None


def test_what_is_made_here_is_joined_there_with_the_code_that_is_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = {
        "vllm": Plan({"vllm": wheel(tmp_path, "vllm", "0.25.1")}, {"torch": "2.11.0", "regex": None}, {"numba"}),
        "pagewire": Plan({"structlog": wheel(tmp_path, "structlog", "26.1")}, {}, set()),
    }
    monkeypatch.setattr(make, "plan", lambda machine, vllm, folder: plans)
    there = tmp_path / "there"
    run(monkeypatch, "make", tmp_path / "pack")
    said = capsys.readouterr().out
    assert "vllm is brought: vllm 0.25.1.\nvllm finds there: torch 2.11.0, regex.\nvllm goes without: numba." in said
    (tmp_path / "pack/vllm.zip.00").rename(tmp_path / "later")
    with pytest.raises(SystemExit) as status:
        run(monkeypatch, "join", tmp_path / "pack", "--into", there)
    assert status.value.code == 1
    assert capsys.readouterr().out == f"vllm lacks vllm.zip.00\npagewire is in {there}/pagewire\n"
    (tmp_path / "later").rename(tmp_path / "pack/vllm.zip.00")
    with pytest.raises(SystemExit) as status:
        run(monkeypatch, "join", tmp_path / "pack", "--into", there)
    assert status.value.code == 0
    seen = "import vllm, pagewire.v1.worker_service_pb2 as w; print(vllm.VERSION, w.__file__)"
    path = os.pathsep.join([str(there / "vllm"), str(there / "pagewire")])
    printed = subprocess.run(
        [sys.executable, "-c", seen], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, check=True,
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert printed.split() == ["0.25.1", f"{there}/pagewire/pagewire/v1/worker_service_pb2.py"]
    manifest = json.loads((tmp_path / "pack/manifest.json").read_text())
    assert [part["versions"] for part in manifest] == [{"vllm": "0.25.1"}, {"structlog": "26.1"}]


def test_requirements_of_both_services_and_the_client_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[set[str]] = []

    def note(requirements: Iterable[Requirement], *_: object) -> Plan:
        asked.append({requirement.name for requirement in requirements})
        return Plan()

    monkeypatch.setattr(make, "resolve", note)
    run(monkeypatch, "plan", tmp_path / "pack")
    assert asked[0] == {"vllm"}
    assert asked[1] >= {"aiohttp", "grpcio", "protobuf", "rich", "torch"}


def test_a_plan_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "plan", lambda machine, vllm, folder: {"vllm": Plan()})
    run(monkeypatch, "plan", tmp_path / "pack")
    assert list((tmp_path / "pack").iterdir()) == []


def test_an_error_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"^bench\.gpu\.pack: .*manifest\.json cannot be read as a manifest"):
        run(monkeypatch, "join", tmp_path, "--into", tmp_path / "there")
    with pytest.raises(SystemExit):
        pack.parse_arguments(["make", "x", "--piece-mib", "0"])
