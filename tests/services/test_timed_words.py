"""From the times of tokens to words, as Whisper's own code tells them apart."""

import pytest

from scheduler_service.frontend.speech.transcript import Segment
from scheduler_service.frontend.speech.words import timed_words


@pytest.mark.parametrize(
    ("pieces", "language", "expected"),
    [
        ([" The", " cat", "fish", "."], "en", [(" The", 0, 1), (" catfish.", 1, 3)]),
        ([" \"", "No", "!\"", " he", "."], "en", [(' "No!"', 0, 3), (" he.", 3, 4)]),
        ([" (", "a", ")"], "en", [(" (a)", 0, 2)]),
        (["今", "日", "。"], "ja", [("今", 0, 1), ("日。", 1, 2)]),
        ([" a", "�", "é", " b"], "en", [(" aé", 0, 3), (" b", 3, 4)]),
    ],
)  # fmt: skip
def test_words_begin_at_spaces_and_punctuation_takes_no_time(
    pieces: list[str], language: str, expected: list[tuple[str, float, float]]
) -> None:
    """A piece of a character, here the second one before the third, reads otherwise than the character."""
    prefixes, text = [], ""
    for piece in pieces:
        prefixes.append(text + piece)
        text += piece.replace("�", "")
    segment = Segment(0.0, 30.0, [*range(len(pieces))])
    found = timed_words(segment, [float(n) for n in range(len(pieces) + 1)], language, prefixes)
    assert [(word.text, word.start, word.end) for word in found] == expected


def test_words_stay_within_their_segment() -> None:
    found = timed_words(Segment(2.0, 3.0, [1, 2]), [1.0, 2.5, 9.0], "en", [" a", " a b"])
    assert [(word.start, word.end) for word in found] == [(2.0, 2.5), (2.5, 3.0)]
