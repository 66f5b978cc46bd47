"""Checks the keys of a quantization_config. For each known key, a kind of valid values is given, or any value is
accepted. An unknown key raises a ValueError that names the key."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from worker_service.wording import named, shown

Kind: TypeAlias = "tuple[str, Callable[[Any], bool]]"
"""A kind of values: a description for error messages, and a function that returns whether a value is valid."""
FLAG: Kind = ("true or false", lambda value: type(value) is bool)
TEXT: Kind = ("a text", lambda value: isinstance(value, str))
COUNT: Kind = ("a whole number above 0", lambda value: type(value) is int and value > 0)
SIZE: Kind = ("a whole number above 0, or -1", lambda value: type(value) is int and (value > 0 or value == -1))
TEXTS: Kind = ("a list of texts", lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value))


def one_of(*values: Any) -> Kind:
    """A kind that accepts only the given values. null is also accepted, because `check_keys` treats a key with null as
    missing."""
    words = " or ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values) or "null"
    return words, lambda value: any(type(value) is type(one) and value == one for one in values)


def check_keys(where: str, json: Mapping[str, Any], kinds: Mapping[str, Kind], notes: Collection[str] = ()) -> None:
    """Raise ValueError if `json` has an unknown key, or a key with an invalid value.

    kinds: known keys with their valid values; notes: known keys that may have any value; where: the path to `json`,
    which error messages put before a key. A key with the value null, {} or [] counts as missing.
    """
    for name, value in json.items():
        if value is None or value in ({}, []) or name == "quant_method" or (name in notes and name not in kinds):
            continue
        if name not in kinds:
            raise ValueError(
                f"it says {where}{named(name)} = {shown(value)}, which is not supported and may change "
                "what the weights mean; remove it if you know that it does not"
            )
        words, fits = kinds[name]
        if not fits(value):
            raise ValueError(f"{where}{name} is {shown(value)}; it must be {words}")


def agreed(json: Mapping[str, Any], *names: str) -> Any:
    """The value of several keys that mean the same; None if all of these keys are missing. Raises ValueError if two
    keys have different values; upper and lower case count as equal."""
    found = {name: json[name] for name in names if json.get(name) is not None}
    for name, value in found.items():
        first = next(iter(found))
        if str(value).lower() != str(found[first]).lower():
            raise ValueError(f"{first} is {shown(found[first])}, and {name}, which means the same, {shown(value)}")
    return next(iter(found.values()), None)
