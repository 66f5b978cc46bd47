"""The served model: its limits, which the engine sends, and the settings in its files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagewire.v1.engine_service_pb2 import ModelLimits
from pagewire_common.model_files.eos_tokens import eos_token_ids
from pagewire_common.model_files.generation_config import FILE, GenerationConfig, GenerationDefaults
from pagewire_common.model_files.generation_keys import TOKEN
from pagewire_common.model_files.json_text import loads
from pagewire_common.model_files.sentence_config import FILE as SENTENCES
from pagewire_common.model_files.sentence_config import SentenceConfig
from pagewire_common.model_files.shown import shown
from pagewire_common.start_error import StartError
from scheduler_service.frontend.forms.forms import Forms
from scheduler_service.frontend.speech.speech_tokens import SpeechTokens
from scheduler_service.frontend.text.tokenization import Tokenizer

MAX_SCORED = 2
"""Score calls need a classifier with at most this number of classes."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Name, limits, defaults and tokenizer of the served model, and its files by name.

    `generates`: whether the model can generate tokens.
    `embedding_size`: length of embedding vectors; 0 means that the model cannot embed.
    `pooling_type`, `normalizes`: the pooling with which the model was trained.
    `num_labels`: number of a classifier's classes; 0 means that the model is no classifier.
    `scores_plainly`: whether a Score call returns the raw output of a classifier.
    `similarity`: the function that compares vectors, by sentence-transformers' name.
    `context_length`: largest number of tokens of a sequence, without lookahead slots for drafts.
    `pool_tokens`: largest number of tokens in a worker's KV cache for all outputs of one request. Each output also
      occupies `num_lookahead_slots` tokens of the KV cache.
    `max_encoder_len`: largest number of tokens of the encoder's input; 0 for a model without an encoder.
    `feature_bytes`: bytes of the features of one window of sound; 0 for a model whose encoder reads no sound.
    `speech_tokens`: control tokens of a model that can transcribe.
    `decoder_start_token_ids`: the default prompt of a decoder behind an encoder; a request may override it.
    `undeclared_keys`: whether JSON outputs may have keys that the schema does not name, unless the request sets
      `strict`.

    A model with random weights may have no tokenizer. Without a tokenizer, prompts are token ids, and outputs have no
    text.
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
    generates: bool = True
    embedding_size: int = 0
    pooling_type: int = 0
    normalizes: bool = False
    num_labels: int = 0
    max_num_batched_tokens: int = 0
    max_encoder_len: int = 0
    feature_bytes: int = 0
    undeclared_keys: bool = False
    decoder_start_token_ids: tuple[int, ...] = ()
    speech_tokens: SpeechTokens | None = None
    similarity: str = "cosine"
    scores_plainly: bool = False
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    files: Mapping[str, bytes] = field(default_factory=dict)
    forms: Forms = field(default_factory=Forms)

    @property
    def tasks(self) -> list[str]:
        """Names of the calls that the model can answer."""
        able = {
            "generate": self.generates,
            "embed": self.embedding_size > 0,
            "transcribe": self.speech_tokens is not None,
            "score": self.embedding_size > 0 or 0 < self.num_labels <= MAX_SCORED,
        }
        return [task for task, is_able in able.items() if is_able]

    @classmethod
    def load(cls, limits: ModelLimits, directory: Path) -> "ServedModel":
        """Read the model's files in `directory`. Reading takes about a second, so call `load` on a thread."""
        config = _read_json(directory / "config.json") or {}
        generation = GenerationConfig.read(config, _read_json(directory / FILE), limits.vocabulary_size)
        tokenizer = Tokenizer(directory) if (directory / "tokenizer.json").exists() else None
        of_tokenizer = tokenizer.eos_token_id if tokenizer else None
        ends = eos_token_ids(config, generation, of_tokenizer)
        starts = _decoder_start(config, generation) if limits.max_encoder_len else ()
        speech_tokens = None
        if limits.feature_bytes and starts and ends:
            speech_tokens = SpeechTokens.read(generation, starts[0], min(ends))
        defaults = GenerationDefaults.of(generation)
        sentences = SentenceConfig.read(config, _read_json(directory / SENTENCES) or {}, limits.num_labels)
        if defaults.stop and tokenizer is None:
            raise StartError(f"{generation.file} says stop_strings, and there is no tokenizer to find them with")
        return cls(
            **{name: getattr(limits, name) for name in limits.DESCRIPTOR.fields_by_name},
            eos_token_ids=ends,
            tokenizer=tokenizer,
            similarity=sentences.similarity,
            scores_plainly=sentences.scores_plainly,
            decoder_start_token_ids=starts,
            speech_tokens=speech_tokens,
            defaults=defaults,
            files={path.name: path.read_bytes() for path in directory.iterdir()},
        )


def _decoder_start(config: Mapping[str, Any], generation: GenerationConfig) -> tuple[int, ...]:
    """The default prompt of a decoder: its start token and, for some models, a forced first token.

    As in transformers, the beginning-of-sequence token replaces a missing start token. The prompt is empty if the
    model's files name neither token.
    """

    def token(name: str) -> int | None:
        token_id: int | None = generation.keys.get(name, config.get(name))
        if token_id is not None and not TOKEN.holds(token_id, generation.vocabulary_size):
            file = generation.file if name in generation.keys else "config.json"
            raise StartError(f"{file}: {name} is {shown(token_id)}; it must be {TOKEN.expected}")
        return token_id

    start, first = token("decoder_start_token_id"), token("forced_bos_token_id")
    if start is None:
        start = token("bos_token_id")
    return () if start is None else (start,) if first is None else (start, first)


def _read_json(path: Path) -> dict[str, Any] | None:
    return loads(path.read_bytes()) if path.exists() else None
