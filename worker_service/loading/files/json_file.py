"""Reads JSON files of a model's folder. A StartError names the file."""

from pathlib import Path
from typing import Any

from pagewire_common.model_files.json_text import loads
from pagewire_common.start_error import StartError

_MAX_BYTES = 100 << 20
"""Bytes of a JSON file. The index of weights has a few hundred bytes per tensor."""


def read_json(file: Path) -> dict[str, Any]:
    content = read_any_json(file)
    if not isinstance(content, dict):
        raise StartError(f"{file} does not hold a JSON object")
    return content


def read_any_json(file: Path, most: int = _MAX_BYTES) -> Any:
    """most: limit in bytes."""
    try:
        if (size := file.stat().st_size) > most:
            raise StartError(f"{file} has {size} bytes; at most {most} are read")
        return loads(file.read_bytes())
    except OSError as error:
        raise StartError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise StartError(f"{file} is not JSON: {error}") from error
