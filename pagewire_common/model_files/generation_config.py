"""Default sampling parameters from the model's generation_config.json, which workers check at start."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagewire_common.model_files.generation_keys import CHOSEN_BY_REQUESTS, kinds
from pagewire_common.model_files.shown import shown
from pagewire_common.sampling import NUMBERS, SamplerParams
from pagewire_common.start_error import StartError

FILE = "generation_config.json"
_MAX_SHOWN = 8
_NUMBERS = tuple(name for name, number in NUMBERS.items() if number.in_files)
_LENGTHS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The generation keys of the model's file `file`, with checked values that are not empty."""

    file: str
    keys: Mapping[str, Any]
    vocabulary_size: int

    @classmethod
    def read(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None, vocabulary_size: int
    ) -> "GenerationConfig":
        """Read generation_config.json or, if missing, the generation keys of config.json, as transformers does.

        Raises StartError for an unknown key, and for a value that no request may set.
        """
        if generation is None:
            file, said = "config.json", {key: config[key] for key in config.keys() & kinds({}).keys()}
        else:
            file, said = FILE, dict(generation)
        said = {key: value for key, value in said.items() if value is not None and value not in ([], {}, "")}
        known = kinds(said)
        if unknown := [key for key in said if key not in known]:
            what = ", ".join(f"{shown(key)} = {shown(said[key])}" for key in unknown[:_MAX_SHOWN])
            more = f" and {len(unknown) - _MAX_SHOWN} more" if len(unknown) > _MAX_SHOWN else ""
            raise StartError(
                f"{file} says {what}{more}, which is not known and may change which tokens are chosen; remove a key "
                "that has no effect"
            )
        for key, value in said.items():
            if not known[key].holds(value, vocabulary_size):
                raise StartError(f"{file}: {key} is {shown(value)}; it must be {known[key].expected}")
        return cls(file, said, vocabulary_size)

    @property
    def chosen_by_requests(self) -> dict[str, Any]:
        """The keys with which the file chooses a decoding method, which only requests may choose here."""
        return {
            key: self.keys[key]
            for key, (_, nothing) in CHOSEN_BY_REQUESTS.items()
            if key in self.keys and self.keys[key] != nothing
        }

    def tokens(self, key: str) -> tuple[int, ...]:
        """The token ids that a key lists: one or several."""
        value = self.keys.get(key, [])
        return tuple(dict.fromkeys(value if isinstance(value, list) else [value]))


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults(SamplerParams):
    """Defaults for fields that a request leaves out, with the same meanings as in transformers.

    Without do_sample, decoding is greedy. `max_length` and `min_length` count the prompt, and apply only without
    `max_new_tokens` and `min_new_tokens`. Of each list in `bad_words`, the last token may not follow the others.
    Requests cannot override `suppressed` and, for the first token, `begin_suppressed`.
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int | None = None
    min_length: int = 0
    stop: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[Sequence[int], ...] = ()
    http_temperature: float = 1.0
    """Temperature of HTTP requests that leave it out. As in OpenAI's API, it is 1 if the file has no temperature."""
    suppressed: tuple[int, ...] = ()
    begin_suppressed: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: GenerationConfig) -> "GenerationDefaults":
        """Raises StartError for values that contradict each other."""
        _check_agreement(config)
        keys, stop, ends = config.keys, config.keys.get("stop_strings", []), config.tokens("eos_token_id")
        given = {name: keys[name] for name in (*_NUMBERS, *_LENGTHS) if name in keys}
        return cls(
            **given | {"temperature": keys.get("temperature", 1.0) if keys.get("do_sample") else 0.0},
            http_temperature=0.0 if keys.get("do_sample") is False else keys.get("temperature", 1.0),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            logit_bias={token_id: bias for (token_id,), bias in keys.get("sequence_bias", [])},
            # as in transformers, bad words do not ban an end-of-sequence token
            bad_words=tuple(
                tuple(word) for word in keys.get("bad_words_ids", []) if word not in [[end] for end in ends]
            ),
            suppressed=config.tokens("suppress_tokens"),
            begin_suppressed=config.tokens("begin_suppress_tokens"),
        )

    @property
    def not_with_beams(self) -> str | None:
        """The first key that beam search does not allow: it changes the model's distribution or shortens outputs."""
        says = {
            "suppress_tokens": self.suppressed,
            "begin_suppress_tokens": self.begin_suppressed,
            "bad_words_ids": self.bad_words,
            "sequence_bias": self.logit_bias,
            "stop_strings": self.stop,
        }
        return next((key for key, value in says.items() if value), None)

    @property
    def num_listed(self) -> int:
        """Number of tokens and words in all lists, which each request's message contains."""
        words = sum(map(len, self.bad_words)) + len(self.bad_words)
        return words + 2 * len(self.logit_bias) + len(self.suppressed) + len(self.begin_suppressed)

    def max_tokens(self, num_prompt_tokens: int) -> int | None:
        """Largest number of output tokens; None without a limit, below 1 if the prompt is too long."""
        if self.max_new_tokens is not None or self.max_length is None:
            return self.max_new_tokens
        return self.max_length - num_prompt_tokens

    def min_tokens(self, num_prompt_tokens: int) -> int:
        return max(0, self.min_length - num_prompt_tokens) if self.min_new_tokens is None else self.min_new_tokens

    def sampling_params(self) -> dict[str, float]:
        """The default values, by the field names of vLLM's engine protocol."""
        values = {name: getattr(self, name) for name in _NUMBERS}
        return values if self.max_new_tokens is None else values | {"max_tokens": self.max_new_tokens}


def _check_agreement(config: GenerationConfig) -> None:
    keys = config.keys
    for least, most in (("min_new_tokens", "max_new_tokens"), ("min_length", "max_length")):
        if least in keys and most in keys and keys[least] > keys[most]:
            raise StartError(f"{config.file}: {least} is {keys[least]}, above {most}, which is {keys[most]}")
    suppressed = {*config.tokens("suppress_tokens")}
    for key in ("forced_bos_token_id", "forced_eos_token_id"):
        if (forced := {*config.tokens(key)}) and forced <= suppressed:
            raise StartError(f"{config.file}: {key} is {shown(keys[key])}, which suppress_tokens bans")
    banned = suppressed | {*config.tokens("begin_suppress_tokens"), *config.tokens("eos_token_id")}
    banned |= {word[0] for word in keys.get("bad_words_ids", []) if len(word) == 1}
    if len(banned) >= config.vocabulary_size:
        raise StartError(f"{config.file} bans every token of the vocabulary, of {config.vocabulary_size} tokens")
