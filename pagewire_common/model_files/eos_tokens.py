"""The tokens that end an output, from a model's files. The scheduler ends an output at one of these tokens. Workers
allow these tokens where the output may end.
"""

from collections.abc import Mapping
from typing import Any

from pagewire_common.model_files.generation_config import GenerationConfig
from pagewire_common.model_files.generation_keys import ENDS
from pagewire_common.model_files.shown import shown
from pagewire_common.start_error import StartError


def eos_token_ids(config: Mapping[str, Any], generation: GenerationConfig, of_tokenizer: int | None) -> tuple[int, ...]:
    """End-of-sequence tokens from generation_config.json. If generation_config.json names no such tokens, they come
    from config.json.

    The tokenizer's own end-of-sequence token is added, as in vLLM: a fine-tuned model may end turns with another token
    than its base model. Raises StartError for an invalid token id.
    """
    named = generation.tokens("eos_token_id")
    if not named and (found := config.get("eos_token_id")) is not None:
        if not ENDS.holds(found, generation.vocabulary_size):
            raise StartError(f"config.json: eos_token_id is {shown(found)}; it must be {ENDS.expected}")
        named = tuple(found) if isinstance(found, list) else (found,)
    also = () if of_tokenizer is None or of_tokenizer >= generation.vocabulary_size else (of_tokenizer,)
    return tuple(dict.fromkeys((*named, *also)))
