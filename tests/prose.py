"""Docstrings that a reader has to read twice: python tests/prose.py [FILES]. `make lint` runs it.

A docstring names its subject first. "Of a vocabulary.", "That a client may leave unread." and "As the client has it."
begin in the middle of a sentence, and the reader has to find the rest in the code. Sentences are short, too.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "bench",
    "deploy",
    "kernels",
    "pagewire_client",
    "pagewire_command",
    "pagewire_common",
    "scheduler_service",
    "worker_service",
)

MAX_WORDS = 35
"""Words of a sentence. The aim is 25; lists of names and formulas need more."""
ALWAYS = "Of|That|What|By|Those|These|Such|They|Them"
"""First words after which the subject is missing, or is a pronoun without its noun."""
IN_ATTRIBUTES = (
    f"{ALWAYS}|It|After|Above|Below|Behind|Beside|Without|Within|With|In|For|From|To|Until|As|Where|Which|If"
)
"""First words of a constant's or a field's docstring: it begins with the unit or the thing."""
_AS_HAS_IT = re.compile(r"As .*\b(has|have|had) (it|them)\b")


def faults(source: str) -> Iterator[tuple[int, str]]:
    """The lines and faults of the docstrings of a module, its classes and functions, and of constants and fields."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for index, statement in enumerate(body if isinstance(body, list) else ()):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    is_attribute = index > 0 and isinstance(body[index - 1], ast.Assign | ast.AnnAssign)
                    yield from ((statement.lineno, fault) for fault in _faults_of(text.strip(), is_attribute))


def _faults_of(text: str, is_attribute: bool) -> Iterator[str]:
    first = re.match(rf"({IN_ATTRIBUTES if is_attribute else ALWAYS})\b", text)
    if first:
        yield f'begins with "{first[0]}", not with its subject'
    elif _AS_HAS_IT.match(text.partition(".")[0]):
        yield 'says "as … has it"'
    for sentence in sentences(text):
        if (num_words := len(sentence.split())) > MAX_WORDS:
            yield f'has a sentence of {num_words} words: "{sentence[:60]}…"'


def sentences(text: str) -> Iterator[str]:
    """The sentences of a docstring. Tables, code and lists of names with colons are none."""
    for paragraph in re.split(r"\n\s*\n", text):
        if not re.search(r"^ {4,}|^\s*[-|>]|::", paragraph, re.MULTILINE):
            yield from re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))


def main(names: list[str]) -> int:
    """Print each fault as file:line: fault, and return the exit status."""
    files = [Path(name) for name in names] or [file for name in FOLDERS for file in (ROOT / name).rglob("*.py")]
    num_faults = 0
    for file in sorted(files):
        for line, fault in faults(file.read_text()):
            print(f"{file.resolve().relative_to(ROOT)}:{line}: the docstring {fault}")  # noqa: T201
            num_faults += 1
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
