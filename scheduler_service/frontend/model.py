"""The model that is served: its limits as the engine tells them, and what its own files say."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagewire.v1.engine_service_pb2 import ModelLimits
from pagewire_common.eos_tokens import eos_token_ids
from scheduler_service.frontend.forms import Forms
from scheduler_service.frontend.generation_defaults import GenerationDefaults
from scheduler_service.frontend.tokenization import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Name, limits, defaults and tokenizer of the model, and the files that say so, by name.

    `pool_tokens` is what all outputs of one request may take of a worker's KV cache, each with `num_lookahead_slots`
    behind it; `context_length` is without these.

    Random weights may come without a tokenizer; then requests are of token ids, and outputs have no text.
    """

    name: str
    fingerprint: str
    dtype: str
    context_length: int
    block_size: int
    pool_tokens: int
    vocabulary_size: int
    max_num_seqs: int
    has_priorities: bool
    has_forms: bool
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    num_lookahead_slots: int = 0
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    files: Mapping[str, bytes] = field(default_factory=dict)
    forms: Forms = field(default_factory=Forms)

    @classmethod
    def load(cls, limits: ModelLimits, directory: Path) -> "ServedModel":
        """Read the files that a worker sent. Takes about a second; call it on a thread."""
        config = _read_json(directory / "config.json")
        generation = _read_json(directory / "generation_config.json")
        return cls(
            **{name: getattr(limits, name) for name in limits.DESCRIPTOR.fields_by_name},
            eos_token_ids=eos_token_ids(config, generation, limits.vocabulary_size),
            tokenizer=Tokenizer(directory) if (directory / "tokenizer.json").exists() else None,
            defaults=GenerationDefaults.from_config(generation),
            files={path.name: path.read_bytes() for path in directory.iterdir()},
        )


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
