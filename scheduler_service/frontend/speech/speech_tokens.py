"""The tokens by which a model that hears is told what to do, as its generation_config.json has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeGuard

from scheduler_service.core import TranscriptParams

SECONDS_PER_TIMESTAMP = 0.02


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """`languages` by their codes and `tasks` by their names; both are empty for a model of one language."""

    start: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    transcript: TranscriptParams

    @classmethod
    def read(cls, generation: Mapping[str, Any], start: int, end: int, vocabulary_size: int) -> Self | None:
        """None where the file does not say how times are marked. What makes no sense is left out.

        start, end: the tokens that outputs begin and end with.
        """

        def is_token(value: object) -> TypeGuard[int]:
            return type(value) is int and 0 <= value < vocabulary_size

        def tokens(name: str) -> list[int]:
            value = generation.get(name)
            return list(filter(is_token, value)) if isinstance(value, list) else []

        def named(name: str) -> dict[str, int]:
            value = generation.get(name)
            items = value.items() if isinstance(value, dict) else ()
            return {str(key): token for key, token in items if is_token(token)}

        silent, most = generation.get("no_timestamps_token_id"), generation.get("max_initial_timestamp_index")
        if not is_token(silent) or not is_token(silent + 1):
            return None
        transcript = TranscriptParams(
            first_timestamp=silent + 1,
            max_initial=most if is_token(most) else vocabulary_size,
            num_text_tokens=end,
            suppressed=(*tokens("suppress_tokens"), silent),
            begin_suppressed=tuple(tokens("begin_suppress_tokens")),
        )
        languages = {code.strip("<|>"): token for code, token in named("lang_to_id").items()}
        return cls(start, languages, named("task_to_id"), transcript)

    def prompt(self, language: str, task: str, before: Sequence[int] = ()) -> tuple[int, ...]:
        """What a transcript begins with, and what it is told of the time before."""
        if not self.languages:
            return (*before, self.start)
        return (*before, self.start, self.languages[language], *((self.tasks[task],) if task in self.tasks else ()))
