"""One request between the servicer and the scheduler: what was asked for, and what its tokens mean as text."""

import time
from dataclasses import dataclass

from scheduler_service.core import SamplingParams, SequenceGroup, SequenceOutput, SequenceStatus
from scheduler_service.stop_strings import StopChecker
from scheduler_service.streams import OutputDelta, OutputStream
from scheduler_service.tokenization import Detokenizer, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request that has been checked against the model's limits, with every default filled in."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0


class RequestState:
    """A request in flight: its group in the scheduler, its text so far, its stream."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, cache_root: bytes) -> None:
        self.request = request
        self.group = SequenceGroup(
            request.request_id,
            request.prompt_token_ids,
            request.sampling,
            cache_root,
            priority=request.priority,
            tenant=request.tenant,
            arrived_at=time.monotonic(),
        )
        self.stream = OutputStream(request.sampling.n)
        self._outputs = [_Text(request, tokenizer) for _ in self.group.sequences]
        self._num_prompt_logprobs = 0

    def process(self, gained: SequenceOutput) -> bool:
        """Turn what a sequence gained into text on the stream; returns True when a stop string ended it."""
        sequence = gained.sequence
        delta = OutputDelta(sequence.index)
        if gained.prompt_logprobs:  # a preempted prompt is computed again; its positions count once
            new = gained.prompt_logprobs[max(0, self._num_prompt_logprobs + 1 - gained.prompt_start) :]
            self._num_prompt_logprobs += len(new)
            delta.prompt_logprobs = new
        stopped = False
        if gained.token_id is not None:
            delta.token_ids.append(gained.token_id)
            if gained.logprobs is not None:
                delta.logprobs.append(gained.logprobs)
            checks_stop = sequence.num_output_tokens > sequence.sampling.min_tokens
            text = self._outputs[sequence.index]
            hides = (
                sequence.status is SequenceStatus.FINISHED_STOPPED and not self.request.include_stop_str_in_output
            )  # the token that ended it is not text
            delta.text, stop = text.step(None if hides else gained.token_id, checks_stop)
            if stop is not None:
                stopped = True
                delta.stop, delta.status = stop, SequenceStatus.FINISHED_STOPPED
            elif sequence.status.is_finished:
                delta.text += text.flush()
                delta.stop, delta.status = sequence.stop_token_id, sequence.status
        if delta.token_ids or delta.prompt_logprobs:
            delta.num_output_tokens = sequence.num_output_tokens
            self.stream.put(delta)
        return stopped

    def abort(self) -> None:
        """End every output that is still open as aborted, with what its text held back."""
        for sequence, text in zip(self.group.sequences, self._outputs, strict=True):
            if sequence.status is SequenceStatus.FINISHED_ABORTED:
                self.stream.put(
                    OutputDelta(
                        sequence.index,
                        text.flush(),
                        status=sequence.status,
                        num_output_tokens=sequence.num_output_tokens,
                    )
                )


class _Text:
    """The text of one output."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._detokenizer: Detokenizer = tokenizer.detokenizer(
            request.prompt_token_ids, skip_special_tokens=request.skip_special_tokens
        )
        self._stops = StopChecker(request.stop, include_stop=request.include_stop_str_in_output)

    def step(self, token_id: int | None, checks_stop: bool) -> tuple[str, str | None]:
        text = "" if token_id is None else self._detokenizer.step(token_id)
        return self._stops.step(text) if checks_stop else (text, None)

    def flush(self) -> str:
        return self._stops.flush()
