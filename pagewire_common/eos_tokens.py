"""The tokens that end an output, as a model's files name them. The scheduler ends outputs there; workers allow it."""

from typing import Any

import structlog

log = structlog.get_logger()


def eos_token_ids(config: dict[str, Any], generation: dict[str, Any], vocabulary_size: int) -> tuple[int, ...]:
    """From generation_config.json or, if it names none, from config.json; what is no token id is left out."""
    for source in (generation, config):
        found = source.get("eos_token_id")
        token_ids = found if isinstance(found, list) else [] if found is None else [found]
        known = tuple(token_id for token_id in token_ids if type(token_id) is int and 0 <= token_id < vocabulary_size)
        if len(known) < len(token_ids):
            log.warning(
                "the model's default is left out",
                name="eos_token_id",
                value=repr(found)[:100],
                expected=f"token ids below {vocabulary_size}",
            )
        if known:
            return known
    return ()
