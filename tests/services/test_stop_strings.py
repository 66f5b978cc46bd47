import time

from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.frontend.text.output_text import ReasoningMarks, ReasoningSplit, StopChecker

texts = st.text("ab c", max_size=12)
stops = st.lists(st.text("ab c", min_size=1, max_size=4), min_size=1, max_size=3)


def feed(pieces: list[str], stop_strings: list[str], include_stop: bool) -> tuple[list[str], str | None]:
    checker = StopChecker(stop_strings, include_stop=include_stop)
    shown = []
    for piece in pieces:
        text, stop = checker.step(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, checker.flush()], None


@given(st.lists(st.text("ab c", max_size=1), max_size=20), stops, st.booleans())
def test_text_ends_where_the_first_stop_string_completes(
    pieces: list[str], stop_strings: list[str], include_stop: bool
) -> None:
    """Character by character: the oracle looks for the shortest prefix that ends with a stop string."""
    shown, stop = feed(pieces, stop_strings, include_stop)
    whole = "".join(pieces)
    for end in range(len(whole) + 1):
        hits = [s for s in stop_strings if whole[:end].endswith(s)]
        if hits:
            longest = max(hits, key=len)
            assert stop == longest
            assert "".join(shown) == (whole[:end] if include_stop else whole[: end - len(longest)])
            return
    assert stop is None
    assert "".join(shown) == whole


@given(st.lists(texts, max_size=6), stops)
def test_nothing_of_a_stop_string_is_ever_shown_however_text_is_cut(pieces: list[str], stop_strings: list[str]) -> None:
    shown, stop = feed(pieces, stop_strings, include_stop=False)
    whole = "".join(pieces)
    assert whole.startswith("".join(shown))
    assert (stop is not None) == any(s in whole for s in stop_strings)
    assert not any(s in "".join(shown) for s in stop_strings)


@given(st.lists(texts, max_size=6), stops)
def test_text_that_cannot_become_a_stop_string_is_not_held_back(pieces: list[str], stop_strings: list[str]) -> None:
    checker = StopChecker(stop_strings, include_stop=False)
    taken = shown = ""
    for piece in pieces:
        text, stop = checker.step(piece)
        if stop is not None:
            return
        taken, shown = taken + piece, shown + text
        held = taken[len(shown) :]
        assert not held or any(s.startswith(held) for s in stop_strings)


def test_sixteen_stop_strings_cost_little_more_than_one() -> None:
    """A token may be a hundred spaces, and a step has one for each of 128 outputs."""
    stop_strings = [f" {chr(ord('a') + number)}{'x' * 254}" for number in range(16)]

    def seconds(stops: list[str]) -> float:
        checker = StopChecker(stops, include_stop=False)
        began = time.perf_counter()
        checker.step(" " * 128 + "!")
        return time.perf_counter() - began

    pairs = [(seconds(stop_strings), seconds(stop_strings[:1])) for _ in range(50)]
    many, one = (min(some) for some in zip(*pairs, strict=True))
    assert many < 3 * one  # 5.4 times as long if every stop string is looked at, 1.4 if only one is


@given(st.lists(st.text("<>/t a", max_size=4), max_size=12), st.booleans())
def test_reasoning_ends_at_its_first_closing_mark_however_text_is_cut(pieces: list[str], is_open: bool) -> None:
    split = ReasoningSplit(ReasoningMarks("<t>", "</t>", is_open))
    inside, behind = map("".join, zip(*map(split.step, pieces), ("", split.flush()), strict=True))
    whole = "".join(pieces)
    if not (is_open or whole.lstrip().startswith("<t>")):
        assert (inside, behind) == ("", whole)
    else:
        before, mark, rest = whole.partition("</t>")
        assert (inside, behind) == (before + mark, rest)
