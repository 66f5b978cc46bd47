"""The programs of examples/python, which people copy, each against a running server."""

import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire_client import LocalServer
from scheduler_service.policies import GROUP

FOLDER = Path(__file__).parents[2] / "examples/python"
RUNS = {
    "chat": ([], ""),
    "batch": ([], "Hello\nOnce upon a time\n"),
    "forms": ([], ""),
    "tools": ([], ""),
    "adapters": ([], ""),
    "vectors": ([], ""),
    "resume": (["state"], ""),
}
"""Words of the command line, and standard input."""


def run(name: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    sys.argv = [name, *words]
    capsys.readouterr()
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return capsys.readouterr().out


TOOLS = pytest.param(
    "tools", marks=pytest.mark.skip("the tiny model wrote no call of tools.py; it needs a trained one")
)


@pytest.mark.parametrize("name", [TOOLS if name == "tools" else name for name in RUNS])
def test_a_program_runs(
    name: str,
    agent_server: LocalServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, given = RUNS[name]
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    monkeypatch.setenv("PAGEWIRE_TARGET", agent_server.target)
    monkeypatch.setenv("PAGEWIRE_URL", agent_server.http_url)
    monkeypatch.chdir(tmp_path)
    printed = run(name, words, capsys)
    if name == "forms":
        assert printed.strip() in ("Paris", "Rome")
    elif name == "resume":
        assert (tmp_path / "state").stat().st_size > 8
        run(name, words, capsys)
    else:
        assert len(printed.splitlines()) >= 1


@pytest.mark.skip(
    "transcripts.py needs a Whisper model; tests/services/test_transcribe.py has its call with a tiny one"
)
def test_subtitles_are_printed() -> None: ...


def test_a_plan_of_capacity_ends_with_enough_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    last = run("capacity", [], capsys).splitlines()[-1]
    assert float(last.split()[-2]) <= 1


def test_the_example_of_a_policy_is_found_when_it_is_installed(tmp_path: Path) -> None:
    about = tmp_path / "shortest_first-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shortest-first\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{GROUP}]\nshortest = shortest_first:ShortestFirst\n")
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-01-01 00:00:00.0,8,4\n")
    command = [sys.executable, "-m", "scheduler_service.simulate", "--scheduling-policy", "shortest"]
    paths = os.pathsep.join([str(tmp_path), str(FOLDER), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "--trace", str(tmp_path / "trace.csv")],
        env=os.environ | {"PYTHONPATH": paths},
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
    )
    assert '"shortest": {' in done.stdout, done.stderr


def test_every_program_is_short_and_run() -> None:
    files = {path.stem: path for path in FOLDER.glob("*.py")}
    assert set(files) == {*RUNS, "transcripts", "capacity", "shortest_first"}
    assert all(len(path.read_text().splitlines()) <= 40 for path in files.values())
