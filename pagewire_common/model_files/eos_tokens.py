"""The tokens that end an output, for the scheduler and for the workers' masks."""

from collections.abc import Mapping
from typing import Any

from pagewire_common.model_files.generation_config import GenerationConfig
from pagewire_common.model_files.generation_keys import ENDS
from pagewire_common.model_files.shown import shown
from pagewire_common.start_error import StartError


def eos_token_ids(config: Mapping[str, Any], generation: GenerationConfig, of_tokenizer: int | None) -> tuple[int, ...]:
    """End-of-sequence tokens from generation_config.json, else config.json. Raises StartError for an invalid id.

    As in vLLM, the tokenizer's own token is added, which may differ after fine-tuning.
    """
    named = generation.tokens("eos_token_id")
    if not named and (found := config.get("eos_token_id")) is not None:
        if not ENDS.holds(found, generation.vocabulary_size):
            raise StartError(f"config.json: eos_token_id is {shown(found)}; it must be {ENDS.expected}")
        named = tuple(found) if isinstance(found, list) else (found,)
    also = () if of_tokenizer is None or of_tokenizer >= generation.vocabulary_size else (of_tokenizer,)
    return tuple(dict.fromkeys((*named, *also)))
