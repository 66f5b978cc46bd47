"""Parses JSON and refuses a name with two different values, of which Python's parser would drop one."""

import json
from typing import Any

from pagewire_common.model_files.shown import shown


def loads(content: str | bytes) -> Any:
    """Raises ValueError for invalid JSON or a name with two values, and RecursionError for deep nesting."""
    return json.loads(content, object_pairs_hook=once)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object from pairs, as an `object_pairs_hook`. Raises ValueError for a name with two values."""
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            if repr(found[key]) != repr(value):  # compares reprs, because NaN differs from itself and 1 equals true
                raise ValueError(f"{shown(key)} is there twice, as {shown(value)} and as {shown(found[key])}")
    return found
