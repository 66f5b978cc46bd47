"""Accepts settings under the previous release's names, as flags and as variables, and logs each use."""

import os
from collections.abc import Callable, Mapping, Sequence

Translate = Callable[[Mapping[str, str]], dict[str, str]]
"""Translates old settings to new ones. Raises ValueError if an old value has no equivalent."""


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def variable(name: str) -> str:
    return f"PAGEWIRE_{name.upper()}"


def from_environment(old_names: Mapping[str, str]) -> dict[str, str]:
    """Variables that are set under old names. An empty value counts as unset."""
    return {old: value for old in old_names if (value := os.environ.get(variable(old)))}


def translated(
    arguments: Sequence[str], old_names: Mapping[str, str], translate: Translate
) -> tuple[list[str], list[str]]:
    """Translate arguments and variables. Returns arguments under new names, and log lines for old names.

    Raises ValueError for a setting under both names, of which one would be ignored.
    """
    of_flags = {flag(old): old for old in old_names}
    rest: list[str] = []
    given: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        name, has_value, value = word.partition("=")
        if (old := of_flags.get(name)) is None:
            rest.append(word)
        elif has_value or (value := next(words, "")):
            given[old] = f"{given[old]},{value}" if old in given else value
        else:
            raise ValueError(f"{name}: a value is expected behind it")
    variables = from_environment(old_names)
    flags_given = {word.partition("=")[0] for word in rest}
    lines = []
    for old in given:
        if (new := flag(old_names[old])) in flags_given:
            raise ValueError(f"{flag(old)} is the old name of {new}; give the new one alone")
        lines.append(_line(flag(old), new))
    for old in variables:
        if os.environ.get(new := variable(old_names[old])):
            raise ValueError(f"{variable(old)} is the old name of {new}; give the new one alone")
        lines.append(_line(variable(old), new))
    # One new setting may consist of several old settings, some given as flags and some as variables.
    parts = {old: value for old, value in variables.items() if old_names[old] in {old_names[one] for one in given}}
    return [*rest, *(f"{flag(new)}={value}" for new, value in translate(parts | given).items())], lines


def renamed(arguments: Sequence[str], old_names: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Rename the flags of a command without variables. Returns the new arguments, and lines for stderr."""
    flags = {flag(old): flag(new) for old, new in old_names.items()}
    words = [word.partition("=") for word in arguments]
    used = dict.fromkeys(name for name, _, _ in words if name in flags)
    for old in used:
        if any(name == flags[old] for name, _, _ in words):
            raise ValueError(f"{old} is the old name of {flags[old]}; give the new one alone")
    return (
        [flags.get(name, name) + separator + value for name, separator, value in words],
        [_line(old, flags[old]) for old in used],
    )


def _line(old: str, new: str) -> str:
    return f"{old} is now {new}; the old name goes with the next release"
