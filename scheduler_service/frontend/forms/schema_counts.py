"""Converts lengths and counts in a JSON schema to integers: llguidance refuses 2.0, which JSON Schema allows for 2."""

from decimal import Decimal
from typing import Any

from scheduler_service.frontend.forms.schema_text import SchemaError, path_to, schemas_in

MAX = (1 << 31) - 1
"""No output has as many characters, items or keys."""
_MIN = ("minLength", "minItems", "minProperties", "minContains")
_MAX = ("maxLength", "maxItems", "maxProperties", "maxContains")


def rewrite_counts(schema: Any) -> None:
    """Convert a schema's counts in place. Raises SchemaError for an invalid count, and for a minimum above `MAX`."""
    for part, path in schemas_in(schema):
        for keyword in (*_MIN, *_MAX):
            if keyword not in part:
                continue
            value, where = part[keyword], path_to(path, keyword)
            if not isinstance(value, int | Decimal) or isinstance(value, bool) or value < 0 or value != int(value):
                raise SchemaError(f"{where} is {str(value)[:40]}; it must be an integer of at least 0")
            if value <= MAX:
                part[keyword] = int(value)
            elif keyword in _MIN:
                raise SchemaError(f"{where} is {value:.4g}, which no output reaches")
            else:
                del part[keyword]
