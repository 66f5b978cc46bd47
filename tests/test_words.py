"""The code speaks of requests, sequences and workers as things, in comments, docstrings, messages and names alike."""

import re
from pathlib import Path

import pytest

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
WORDS = "who|whom|whoever|nobody|nobodys|somebody|everybody|anybody|no one|someone|everyone|anyone"
PERSONS = re.compile(rf"(?<![a-z])({WORDS})(?![a-z])", re.IGNORECASE)
PATTERNS_OF_THEIR_OWN = ("test_docs.py", "test_words.py")


@pytest.mark.parametrize("folder", FOLDERS)
def test_code_speaks_of_no_persons(folder: str) -> None:
    files = [file for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        if file.name not in PATTERNS_OF_THEIR_OWN
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if PERSONS.search(line.replace("_", " "))
    ]
    assert found == []
