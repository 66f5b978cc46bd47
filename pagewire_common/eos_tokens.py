"""The tokens that end an output, as a model's files name them. The scheduler ends outputs there; workers allow it."""

from collections.abc import Mapping
from typing import Any

import structlog

log = structlog.get_logger()


def eos_token_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], of_tokenizer: int | None, vocabulary_size: int
) -> tuple[int, ...]:
    """From generation_config.json or, if it names none, from config.json; what is no token id is left out.

    The tokenizer's own end of sequence is one too, as in vLLM: base models are fine-tuned to end turns with another.
    """
    also = () if of_tokenizer is None or of_tokenizer >= vocabulary_size else (of_tokenizer,)
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
            return tuple(dict.fromkeys((*known, *also)))
    return also
