"""The code speaks of requests, sequences and workers as things, in comments, docstrings, messages and names alike."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from persons import persons_in

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "bench",
    "deploy",
    "kernels",
    "pagewire_client",
    "pagewire_command",
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


VISIBLE = {
    "guess": "a label of metrics, and a member of recorded timings",
    "guesses": "a key of cost models that are kept in files",
    "guess_us": "a field of the contracts",
    "lora_dir": "a flag",
    "lora_modules": "a flag, as vLLM has it",
    "max_loras": "a flag, as vLLM has it, and the field of the contracts",
    "max_cpu_loras": "a flag, as vLLM has it, and the field of the contracts",
    "max_lora_rank": "a flag, as vLLM has it",
    "max_held_loras": "a field of recordings",
    "lora_copy_seconds": "a field of the contracts",
    "lora_name": "a field of requests, as vLLM has it",
    "lora_names": "fields of requests",
    "LORA_NAME": "metadata of requests",
    "add_lora": "the kernel's name in the literature",
    "LoraWeights": "the operands of that kernel",
}
"""Names that clients, operators or files know. The value is the reason."""
PACKAGES = (
    "bench",
    "kernels",
    "pagewire_client",
    "pagewire_command",
    "pagewire_common",
    "scheduler_service",
    "worker_service",
)


def words_to_avoid() -> set[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Words")[2].partition("\n## ")[0]
    rows = [row.split("|")[3] for row in text.splitlines() if row.startswith("| ")]
    return {word for cell in rows for word in re.findall(r"`(\w+)`", cell)}


def names_in(source: str) -> Iterator[tuple[int, str]]:
    """Names that a module gives: to functions, classes, arguments, variables and fields."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name


def parts_of(name: str) -> set[str]:
    """The words of a name in snake case or camel case; words of a constant stay in capitals."""
    return set(name.split("_")) | {part.lower() for part in re.findall(r"[A-Z][a-z]+", name)}


def test_a_thing_has_the_name_that_the_table_of_words_gives_it() -> None:
    avoided = words_to_avoid()
    assert {"guess", "MOST", "alike"} <= avoided
    found = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        for line, name in names_in(file.read_text())
        if name.lstrip("_") not in VISIBLE and avoided & parts_of(name)
    ]
    assert found == []
