"""Reads the JSON objects that describe a model's image processor. Every key is read, or refused by name."""

from collections.abc import Collection, Mapping
from typing import Any

from pagewire_common.model_files.shown import shown

_MAX_PAIRS = 256
LARGEST = 1 << 26
"""Largest size in pixels, and number of pixels, that a file may state."""
PIXELS = (
    *("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "resample", "do_convert_rgb"),
    "temporal_patch_size",
)
"""Keys that change pixels, but no layout. The image processor of transformers obeys these keys."""
_WITHOUT_EFFECT = (
    *("processor_class", "image_processor_type", "feature_extractor_type", "_processor_class", "auto_map"),
    *("_valid_processor_keys", "device", "return_tensors"),
)
"""Keys of any processor."""
IMAGES_WITHOUT_EFFECT = (
    *("disable_grouping", "input_data_format", "data_format", "default_to_square", "image_seq_length"),
    *("return_row_col_info", "return_metadata"),
)


class Settings:
    """A JSON object. As in transformers, null counts as missing. Methods raise ValueError with the file and the key.
    `unread`: keys that need no reader, besides `_WITHOUT_EFFECT`."""

    def __init__(self, where: str, values: Mapping[str, Any], unread: Collection[str] = ()) -> None:
        self._where = where
        self._values = {key: value for key, value in values.items() if value is not None}
        self._read = {*_WITHOUT_EFFECT, *unread}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def integer(self, key: str, default: int, *, least: int = 1) -> int:
        return self._integer(key, self._value(key, default), least)

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.refused(key, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.refused(key, "true or false")
        return value

    def side(self, key: str, default: int) -> int:
        """An integer, or a list of two equal integers."""
        value = self._value(key, default)
        match value:
            case [one, other] if one == other:
                value = one
            case {"height": one, "width": other} if one == other and len(value) == 2:
                value = one
        return self._integer(key, value, 1)

    def size(self, key: str, default: Mapping[str, int]) -> Mapping[str, int]:
        """A size such as {"height": 224, "width": 224}."""
        value = self._value(key, default)
        if not isinstance(value, dict):
            raise self.refused(key, "an object")
        given = {name: number for name, number in value.items() if number is not None}
        return {name: self._integer(f"{key}.{name}", number, 1) for name, number in given.items()}

    def pairs(self, key: str, default: list[list[int]]) -> list[tuple[int, int]]:
        """A list of pairs of sizes in pixels."""
        value = self._value(key, default)
        if not isinstance(value, list) or not 1 <= len(value) <= _MAX_PAIRS:
            raise self.refused(key, f"a list of 1 to {_MAX_PAIRS} pairs")
        found = []
        for pair in value:
            if not isinstance(pair, list) or len(pair) != 2:
                raise self.refused(key, "a list of pairs")
            found.append((self._integer(key, pair[0], 1), self._integer(key, pair[1], 1)))
        return found

    def group(self, key: str) -> "Settings":
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.refused(key, "an object")
        return Settings(f"{key} of {self._where}", value)

    def require(self, key: str, *values: object) -> None:
        """Refuse other values than those, if there is a value."""
        found = self._value(key, values[0])
        if not any(found == value and type(found) is type(value) for value in values):
            raise self.refused(key, " or ".join(map(shown, values)))

    def ignore(self, *keys: str) -> None:
        self._read.update(keys)

    def finish(self) -> None:
        """Refuse the keys that were not read."""
        for key in self._values:
            if key not in self._read:
                raise ValueError(
                    f"{self._where} has the unknown key {shown(key)}, which may change how images or sounds are read"
                )

    def refused(self, key: str, wanted: str) -> ValueError:
        return ValueError(f"{key} in {self._where} is {shown(self._values.get(key))}; it must be {wanted}")

    def _value(self, key: str, default: Any) -> Any:
        self._read.add(key)
        return self._values.get(key, default)

    def _integer(self, key: str, value: object, least: int) -> int:
        if type(value) is not int or not least <= value <= LARGEST:
            raise ValueError(
                f"{key} in {self._where} is {shown(value)}; it must be a whole number from {least} to {LARGEST}"
            )
        return value
