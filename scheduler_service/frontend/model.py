"""The served model: its limits, which the engine sends, and the settings in its files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pagewire.v1.engine_service_pb2 import ModelLimits
from pagewire_common.images.families import read_image_layouts
from pagewire_common.images.layout import ImageLayouts
from pagewire_common.images.model_images import Encode
from pagewire_common.model_files.eos_tokens import eos_token_ids
from pagewire_common.model_files.generation_config import FILE, GenerationConfig, GenerationDefaults
from pagewire_common.model_files.generation_keys import TOKEN
from pagewire_common.model_files.json_text import loads
from pagewire_common.model_files.sentence_config import FILE as SENTENCES
from pagewire_common.model_files.sentence_config import SentenceConfig
from pagewire_common.model_files.shown import shown
from pagewire_common.sounds.families import read_sound_layouts
from pagewire_common.start_error import StartError
from scheduler_service.frontend.chat.find_syntax import find_syntax
from scheduler_service.frontend.chat.syntax import ChatSyntax
from scheduler_service.frontend.forms.forms import Forms
from scheduler_service.frontend.images.checker import ImageChecker
from scheduler_service.frontend.speech.speech_tokens import SpeechTokens
from scheduler_service.frontend.text.tokenization import Tokenizer

MAX_SCORED = 2


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Name, limits, defaults and tokenizer of the served model.

    `embedding_size`, `num_labels`, `max_encoder_len`, `feature_bytes`, `prompt_embeds_size`,
    `encoder_cache_size`: 0 if the model lacks this ability.
    `pooling_type`, `normalizes`: the pooling with which the model was trained.
    `scores_plainly`: a Score call returns the classifier's raw output.
    `similarity`: the function that compares vectors, by sentence-transformers' name.
    `context_length`: tokens of a sequence, without lookahead slots for drafts.
    `pool_tokens`: tokens in a worker's KV cache for all outputs of one request, and their `num_lookahead_slots`.
    `feature_bytes`: bytes of the features of one window of sound.
    `decoder_start_token_ids`: the default prompt of a decoder behind an encoder.
    `undeclared_keys`: JSON outputs may have keys that the schema does not name, unless the request sets `strict`.
    `tokenizer`: None for some models with random weights; prompts are then token ids, and outputs have no text.
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
    prompt_embeds_size: int = 0
    encoder_cache_size: int = 0
    undeclared_keys: bool = False
    decoder_start_token_ids: tuple[int, ...] = ()
    speech_tokens: SpeechTokens | None = None
    similarity: str = "cosine"
    scores_plainly: bool = False
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    chat_syntax: ChatSyntax | None = None
    """How the model writes reasoning and tool calls; None if its chat template has no form that is known."""
    forms: Forms = field(default_factory=Forms)
    images: ImageLayouts | None = None
    images_refusal: str = ""
    """Why the model has images and reads none; empty otherwise."""
    sounds: ImageLayouts | None = None
    """How the model reads sounds in prompts."""
    sounds_refusal: str = ""
    """Why the model has sounds and reads none; empty otherwise."""
    image_checker: ImageChecker = field(default_factory=ImageChecker)

    @property
    def reads_images(self) -> bool:
        return self.images is not None and self.encoder_cache_size > 0

    @property
    def reads_sounds(self) -> bool:
        return self.sounds is not None and self.encoder_cache_size > 0

    @property
    def reads(self) -> str:
        """The possible contents of messages, for errors."""
        if self.reads_sounds:
            return "text and sounds"
        if self.reads_images:
            return "text and images"
        refusal = self.images_refusal or self.sounds_refusal
        return f"text alone ({refusal})" if refusal else "text alone"

    @property
    def tasks(self) -> list[str]:
        able = {
            "generate": self.generates,
            "embed": self.embedding_size > 0,
            "transcribe": self.speech_tokens is not None,
            "score": self.embedding_size > 0 or 0 < self.num_labels <= MAX_SCORED,
        }
        return [task for task, is_able in able.items() if is_able]

    @property
    def chats(self) -> dict[str, str]:
        """How the model writes reasoning and tool calls, for operators and clients."""
        syntax = self.chat_syntax
        by_template = syntax is not None and syntax.has_calls and self.tokenizer is not None
        has_tools = by_template and self.tokenizer is not None and self.tokenizer.template_names("tools")
        return {
            "family": syntax.family if syntax else "unknown",
            "reasoning": "yes" if syntax and (syntax.reasoning or syntax.has_channels) else "no",
            "tools": "chat template" if has_tools else "system message",
        }

    def with_limits(self, limits: ModelLimits) -> "ServedModel":
        return replace(self, **_values(limits))

    @classmethod
    def load(
        cls, limits: ModelLimits, directory: Path, response_template: Mapping[str, Any] | None = None
    ) -> "ServedModel":
        """Read the model's files, on a thread: reading takes about a second."""
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
        images, images_refusal = _layouts(read_image_layouts, directory, tokenizer)
        sounds, sounds_refusal = _layouts(read_sound_layouts, directory, tokenizer)
        return cls(
            **_values(limits),
            images=images,
            images_refusal=images_refusal,
            sounds=sounds,
            sounds_refusal=sounds_refusal,
            eos_token_ids=ends,
            tokenizer=tokenizer,
            similarity=sentences.similarity,
            scores_plainly=sentences.scores_plainly,
            decoder_start_token_ids=starts,
            speech_tokens=speech_tokens,
            defaults=defaults,
            chat_syntax=(
                find_syntax(tokenizer.chat_template, response_template or tokenizer.response_template)
                if tokenizer
                else None
            ),
        )


def _layouts(
    read: Callable[[Path, Encode], ImageLayouts | None], directory: Path, tokenizer: Tokenizer | None
) -> tuple[ImageLayouts | None, str]:
    """How the model reads images or sounds, or why it reads none."""
    if tokenizer is None:
        return None, ""
    try:
        return read(directory, tokenizer.special_ids), ""
    except ValueError as error:
        return None, str(error)


def _values(limits: ModelLimits) -> dict[str, Any]:
    return {name: getattr(limits, name) for name in limits.DESCRIPTOR.fields_by_name}


def _decoder_start(config: Mapping[str, Any], generation: GenerationConfig) -> tuple[int, ...]:
    """The start token (in transformers' way, else the beginning-of-sequence token), and for some models a forced first
    one.
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
