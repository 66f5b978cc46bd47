"""bench/README.md, `python -m bench` and the modules of bench/ agree on what there is to measure."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from bench.__main__ import BENCHES, main

ROOT = Path(__file__).parents[2]
STARTED_BY_OTHERS = {"bench.__main__", "bench.fleet.raw_load", "bench.fleet.sleeping_workers",
                     "bench.pictures.draw", "bench.pictures.page", "bench.pictures.record",
                     "bench.systems.peer_vllm_scheduler"}  # fmt: skip


def test_the_table_names_every_benchmark_and_says_what_the_code_says() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", (ROOT / "bench/README.md").read_text(), re.M)
    assert [(name, measures) for name, measures, _, _ in rows] == [
        (name, measures) for name, (_, measures) in BENCHES.items()
    ]


def test_every_program_of_the_folder_has_a_name() -> None:
    programs = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in (ROOT / "bench").rglob("*.py")
        if 'if __name__ == "__main__":' in file.read_text()
    }
    assert programs - STARTED_BY_OTHERS == {module for module, _ in BENCHES.values()}


def test_a_name_starts_its_program_with_its_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "fleet", "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: bench fleet")
    assert "--most" in shown


def test_without_a_name_all_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["bench"])
    main()
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown and measures in shown for name, (_, measures) in BENCHES.items())


def test_the_names_and_the_packing_need_the_standard_library_alone() -> None:
    """-S leaves out every installed package, as on a machine that has nothing of this project."""
    for arguments in ([], ["pack", "inventory"]):
        program = [sys.executable, "-S", "-m", "bench", *arguments]
        assert subprocess.run(program, cwd=ROOT, env={}, capture_output=True, text=True, check=True).stdout


def test_an_unknown_name_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "speed"])
    with pytest.raises(SystemExit, match="'speed' is no benchmark; there are serving, http"):
        main()


@pytest.mark.parametrize("name", BENCHES)
def test_every_name_leads_to_a_main(name: str) -> None:
    assert callable(import_module(BENCHES[name][0]).main)


def test_the_makefile_starts_names_of_the_table() -> None:
    makefile = (ROOT / "Makefile").read_text()
    names = re.findall(r"python -m bench (\w+)|-m bench (\w+)", makefile)
    (of_all,) = re.findall(r"^BENCHES := (.+)$", makefile, re.M)
    used = {one or other for one, other in names} | set(of_all.split())
    assert {"serving", "serve_gpu", "fleet", "scheduler"} <= used <= set(BENCHES)
