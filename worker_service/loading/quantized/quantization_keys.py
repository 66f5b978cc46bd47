"""Checks the keys of a quantization_config. A ValueError names an unknown key."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from worker_service.wording import named, shown

Kind: TypeAlias = "tuple[str, Callable[[Any], bool]]"
"""Description for error messages, and whether a value is valid."""
FLAG: Kind = ("true or false", lambda value: type(value) is bool)
TEXT: Kind = ("a text", lambda value: isinstance(value, str))
COUNT: Kind = ("a whole number above 0", lambda value: type(value) is int and value > 0)
SIZE: Kind = ("a whole number above 0, or -1", lambda value: type(value) is int and (value > 0 or value == -1))
TEXTS: Kind = ("a list of texts", lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value))


def one_of(*values: Any) -> Kind:
    """`check_keys` treats null as missing."""
    words = " or ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values) or "null"
    return words, lambda value: any(type(value) is type(one) and value == one for one in values)


def check_keys(where: str, json: Mapping[str, Any], kinds: Mapping[str, Kind], notes: Collection[str] = ()) -> None:
    """Raise ValueError for an unknown key or an invalid value. null, {} and [] count as missing. notes: known keys with
    any value; where: the path to `json` for error messages."""
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
    """The value of keys with the same meaning; None if all are missing. Raises ValueError if values differ (case
    aside)."""
    found = {name: json[name] for name in names if json.get(name) is not None}
    for name, value in found.items():
        first = next(iter(found))
        if str(value).lower() != str(found[first]).lower():
            raise ValueError(f"{first} is {shown(found[first])}, and {name}, which means the same, {shown(value)}")
    return next(iter(found.values()), None)
