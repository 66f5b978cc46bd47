"""The arguments of a call as one object, wherever the call was cut."""

import json
import time

import pytest

from scheduler_service.frontend.http.chats.call_object import CallObject


def object_of(*parts: str) -> CallObject:
    found = CallObject()
    for part in parts:
        found.add(part)
    return found


TEXT = '{"a": [1, {"b": "x\\"}"}, 2.5], "c": {"d": null, "e": 17}}'


@pytest.mark.parametrize("size", [1, 2, 7, len(TEXT)])
def test_a_cut_call_has_the_parts_that_are_complete(size: int) -> None:
    pieces = [TEXT[start : start + size] for start in range(0, len(TEXT), size)]
    assert object_of(*pieces).value() == json.loads(TEXT)
    whole = object_of()
    for piece in pieces:
        whole.add(piece)
        assert isinstance(whole.value(), dict)
    assert object_of(TEXT[: TEXT.index(", 2.5")]).value() == {"a": [1, {"b": 'x"}'}]}
    assert object_of(TEXT[: TEXT.index("ull")]).value() == {"a": [1, {"b": 'x"}'}, 2.5], "c": {}}
    assert object_of(TEXT[:-3]).value()["c"] == {"d": None, "e": 1}


def test_the_time_is_linear_in_the_depth() -> None:
    assert object_of(*['{"a":'] * 500, "1").value()
    began = time.thread_time()
    assert object_of(*['{"a":'] * 100_000).text() == "{}"  # too deep to be read
    assert time.thread_time() - began < 2.0
