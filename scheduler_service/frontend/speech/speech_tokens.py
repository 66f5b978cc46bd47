"""The control tokens of a speech model, read from generation_config.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from pagewire_common.model_files.generation_config import GenerationConfig
from pagewire_common.model_files.shown import shown
from pagewire_common.start_error import StartError
from scheduler_service.core import TranscriptParams
from scheduler_service.frontend.speech.languages import code_of

SECONDS_PER_TIMESTAMP = 0.02


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """The control tokens of a speech model.

    `languages`, `tasks`: token ids by code and by name; empty for a model of one language.
    `language`: code of the default language; "" means that the model detects it.
    `aligns`: whether the model has alignment heads, from which workers compute the times of words.
    """

    start: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    transcript: TranscriptParams
    language: str = ""
    aligns: bool = False

    @classmethod
    def read(cls, generation: GenerationConfig, start: int, end: int) -> Self | None:
        """The control tokens; None without timestamps in the file. Raises StartError for invalid values."""
        keys, most = generation.keys, generation.vocabulary_size
        silent = keys.get("no_timestamps_token_id")
        if silent is None:
            return None
        if silent + 1 >= most:
            raise StartError(
                f"{generation.file}: no_timestamps_token_id is {silent}; behind it must be the token of 0 s, and the "
                f"model has {most} tokens"
            )
        transcript = TranscriptParams(
            first_timestamp=silent + 1,
            max_initial=keys.get("max_initial_timestamp_index", most),
            num_text_tokens=end,
            suppressed=(*generation.tokens("suppress_tokens"), silent),
            begin_suppressed=generation.tokens("begin_suppress_tokens"),
        )
        languages = {code.strip("<|>"): token for code, token in keys.get("lang_to_id", {}).items()}
        tasks = keys.get("task_to_id", {})
        language, aligns = _language(generation, languages, tasks, silent), "alignment_heads" in keys
        return cls(start, languages, tasks, transcript, language, aligns)

    def prompt(self, language: str, task: str, before: Sequence[int] = ()) -> tuple[int, ...]:
        """The decoder's prompt for a transcript with timestamps. `before`: tokens that precede the start token."""
        if not self.languages:
            return (*before, self.start)
        return (*before, self.start, self.languages[language], *((self.tasks[task],) if task in self.tasks else ()))

    def plain_prompt(self, language: str, task: str) -> tuple[int, ...]:
        return (*self.prompt(language, task), self.transcript.first_timestamp - 1)


def _language(generation: GenerationConfig, languages: Mapping[str, int], tasks: Mapping[str, int], silent: int) -> str:
    """The code of the default language, which older files store as a forced token."""
    named = generation.keys.get("language", "")
    forced = [token for _, token in generation.keys.get("forced_decoder_ids", []) if token is not None]
    codes = {token: code for code, token in languages.items()}
    if others := {*forced} - {*codes, tasks.get("transcribe"), silent}:
        raise StartError(
            f"{generation.file}: forced_decoder_ids has the token {min(others)}, which is none of a language, of "
            "transcribing or of no times; a call of Transcribe says what else is wanted"
        )
    if not named:
        return next((codes[token] for token in forced if token in codes), "")
    if (code := code_of(named.strip("<|>"))) not in languages:
        raise StartError(f"{generation.file}: language is {shown(named)}, which lang_to_id does not have")
    return code
