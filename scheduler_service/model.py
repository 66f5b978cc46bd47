"""The model that is served: what the scheduler learns of it from the first worker."""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagewire_common.start_error import StartError
from scheduler_service.codec import WorkerInfo
from scheduler_service.core.config import blocks_within_window
from scheduler_service.generation_defaults import GenerationDefaults, eos_token_ids
from scheduler_service.settings import SchedulerSettings
from scheduler_service.tokenization import Tokenizer


def model_name(model: str) -> str:
    """The name that a worker gives the model of this --model value: a folder's name, a GGUF file's stem.

    Raises StartError when the value is a path to nothing.
    """
    path = Path(os.path.expanduser(model))
    if path.exists():
        return path.stem if path.suffix == ".gguf" and path.is_file() else path.resolve().name
    if path.suffix == ".gguf" or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", model):
        raise StartError(f"there is no file or folder {path}")
    return model


def max_sequence_tokens(info: WorkerInfo) -> int:
    """The most tokens of one sequence on this worker: the model's limit, or its pool if that must hold them all."""
    if info.sliding_window:
        held = blocks_within_window(info.sliding_window, info.max_num_batched_tokens, info.block_size)
        if held <= info.num_device_blocks:
            return info.max_model_len
    return min(info.max_model_len, info.num_device_blocks * info.block_size)


def max_num_seqs(settings: SchedulerSettings, info: WorkerInfo) -> int:
    """The most sequences in one step of this worker; each takes at least one token of the step."""
    return min(settings.max_num_seqs, info.max_num_seqs, settings.max_num_batched_tokens, info.max_num_batched_tokens)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Name, limits, defaults and tokenizer of the model.

    `pool_tokens` is what all outputs of one request may take of a worker's KV cache.

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
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)

    @classmethod
    def load(cls, info: WorkerInfo, directory: Path, *, max_num_seqs: int, has_priorities: bool) -> "ServedModel":
        """Read the files that a worker sent. Takes about a second; call it on a thread."""
        config = _read_json(directory / "config.json")
        generation = _read_json(directory / "generation_config.json")
        context_length = max_sequence_tokens(info)
        return cls(
            name=info.model_id,
            fingerprint=info.model_fingerprint,
            dtype=info.dtype,
            context_length=context_length,
            block_size=info.block_size,
            # A promised size must fit into every worker, and a worker that joins later may have less room than the
            # first one, because its machine held other things when it started. So the size is half of the first
            # worker's room, or the longest sequence.
            pool_tokens=max(context_length, info.num_device_blocks // 2 * info.block_size),
            vocabulary_size=info.vocabulary_size,
            max_num_seqs=max_num_seqs,
            has_priorities=has_priorities,
            eos_token_ids=eos_token_ids(config, generation, info.vocabulary_size),
            tokenizer=Tokenizer(directory) if (directory / "tokenizer.json").exists() else None,
            defaults=GenerationDefaults.from_config(generation),
        )


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
