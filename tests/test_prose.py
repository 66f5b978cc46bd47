"""What the lint of docstrings finds, and what it lets pass."""

import pytest
from prose import MAX_WORDS, faults

LONG = "The limit " + "is long " * MAX_WORDS + "."


@pytest.mark.parametrize(
    "source",
    [
        '"""Of a vocabulary."""',
        '"""That a client may leave unread."""',
        'def run() -> None:\n    """By system, and the number of tokens."""',
        'class Text:\n    """As the client has it."""',
        'LIMIT = 5\n"""Seconds. After it, a client is cut off."""\nX = 1\n"""After which a client is cut off."""',
        'class Figures:\n    size: int\n    """Where the median lies."""',
        f'"""{LONG}"""',
    ],
)
def test_a_docstring_that_begins_without_its_subject_or_never_ends_is_a_fault(source: str) -> None:
    assert len(list(faults(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        '"""Tokens of a vocabulary."""',
        'LIMIT = 5\n"""Seconds without a message after which a client is cut off."""',
        'def text() -> str:\n    """As in llama.cpp, a space is put in front."""',
        f'"""A table.\n\n    {LONG}"""',
    ],
)
def test_a_docstring_that_begins_with_its_subject_is_none(source: str) -> None:
    assert list(faults(source)) == []
