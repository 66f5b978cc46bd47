"""Converts the tokens of a window of sound to segments of text with times, each when it is complete."""

from dataclasses import dataclass

from scheduler_service.core import TranscriptParams
from scheduler_service.frontend.speech.speech_tokens import SECONDS_PER_TIMESTAMP


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the transcript. Start and end are in seconds from the window's beginning."""

    start: float
    end: float
    token_ids: list[int]
    mean_logprob: float | None = None


class Transcript:
    """The transcript of a window of `seconds` seconds of sound. Call `gain` for each token, then `rest` and `next`.

    A timestamp token precedes and follows each segment. If the last has no end, its speech continues in the next
    window, which begins at the end of the last complete segment, as in Whisper's own code.
    """

    def __init__(self, params: TranscriptParams, seconds: float) -> None:
        self._params = params
        self._seconds = seconds
        self._begin: float | None = None
        self._token_ids: list[int] = []
        # `_logprobs`: log-probabilities of `_token_ids`, if known. `_end`: end of the last complete segment, in
        # seconds.
        self._logprobs: list[float] = []
        self._end = 0.0

    def gain(self, token_id: int, logprob: float | None = None) -> Segment | None:
        """Add a token. Returns the segment that it completes, or None."""
        if token_id < self._params.num_text_tokens:
            self._token_ids.append(token_id)
            if logprob is not None:
                self._logprobs.append(logprob)
        if token_id < self._params.first_timestamp:
            return None
        time = min((token_id - self._params.first_timestamp) * SECONDS_PER_TIMESTAMP, self._seconds)
        if not self._token_ids:
            self._begin = time
            return None
        segment = self._segment(time)
        self._begin, self._token_ids, self._logprobs, self._end = None, [], [], time
        return segment

    def _segment(self, end: float) -> Segment:
        mean = sum(self._logprobs) / len(self._logprobs) if self._logprobs else None
        return Segment(self._begin or 0.0, end, self._token_ids, mean)

    @property
    def rest(self) -> Segment | None:
        """The segment without an end time, if it is the window's only segment. It then ends with the window."""
        if self._end or not self._token_ids:
            return None
        return self._segment(self._seconds)

    @property
    def next(self) -> float:
        """The start of the next window, in seconds from this window's beginning; final silence is skipped."""
        goes_on = self._end and (self._token_ids or self._begin is not None)
        return self._end if goes_on else self._seconds
