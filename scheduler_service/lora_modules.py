"""Parses `--lora-modules`, with vLLM's syntax: a value is NAME=FOLDER, or JSON with "name" and "path"."""

import json
from collections.abc import Iterator

from pagewire_common.model_files.json_text import once

KEYS = {"name", "path"}


def parse_modules(value: object) -> object:
    """Each value as NAME=FOLDER. Raises ValueError for JSON with other keys."""
    if isinstance(value, str):
        return list(_modules(value))
    if isinstance(value, list):
        return [module for item in value for module in (_modules(item) if isinstance(item, str) else [_of_json(item)])]
    return value


def _modules(text: str) -> Iterator[str]:
    while text := text.lstrip(", \n"):
        if text.startswith(("{", "[")):
            try:
                found, end = json.JSONDecoder(object_pairs_hook=once).raw_decode(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"it is neither NAME=FOLDER nor JSON: {error}") from None
            yield from map(_of_json, found if isinstance(found, list) else [found])
            text = text[end:]
        else:
            module, _, text = text.partition(",")
            yield module.rstrip()


def _of_json(module: object) -> str:
    if not isinstance(module, dict):
        raise ValueError(f"{module!r} is no adapter; one in JSON is an object")
    if unknown := sorted(module.keys() - KEYS):
        raise ValueError(f"the key {unknown[0]!r} is not known here; known are name and path")
    name, path = module.get("name"), module.get("path")
    if not (isinstance(name, str) and isinstance(path, str)) or "=" in name:
        raise ValueError('an adapter in JSON has a "name" without = and a "path", both texts')
    return f"{name}={path}"
