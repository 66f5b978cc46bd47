"""The code speaks of requests, sequences and workers as things, in comments, docstrings, messages and names alike."""

from pathlib import Path

import pytest
from persons import persons_in

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "bench",
    "deploy",
    "kernels",
    "pagewire_client",
    "pagewire_common",
    "scheduler_service",
    "tests",
    "worker_service",
)
SUFFIXES = (".cpp", ".h", ".py", ".yaml", ".yml")


@pytest.mark.parametrize("folder", FOLDERS)
def test_code_speaks_of_no_persons(folder: str) -> None:
    files = [file for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        if file.name != "persons.py"
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if persons_in(line)
    ]
    assert found == []
