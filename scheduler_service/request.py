"""One request between the servicer and the scheduler: what was asked for, and what its tokens mean as text."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from scheduler_service.core import SamplingParams, SequenceGroup, SequenceOutput, SequenceStatus
from scheduler_service.core.groups.beam_search import Hypothesis
from scheduler_service.finished_requests import RequestMetrics
from scheduler_service.output_text import OutputText
from scheduler_service.request_memory import STRING_BYTES, UnreadOutput
from scheduler_service.statistics import Statistics
from scheduler_service.streams import OutputDelta, OutputStream
from scheduler_service.tokenization import Tokenizer
from scheduler_service.turns import Turns
from scheduler_service.whole_output import WholeOutput


def request_key(tenant: str, request_id: str) -> str:
    """The name of a request inside the server. Every tenant has request ids of its own.

    Both parts are percent-encoded, so no two pairs have the same name, and most request ids stay as they are.
    """
    name = quote(request_id, safe="")
    return f"{quote(tenant, safe='')}/{name}" if tenant else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """What the client already holds: tokens of each index, or of none; which outputs it has whole; how many of the
    prompt's log-probabilities. `texts` holds the text of each output that has tokens.

    `begun` has tokens of outputs that are sent when all have ended; such outputs are generated again.
    """

    token_ids: tuple[Sequence[int], ...] = ()
    begun: Mapping[int, Sequence[int]] = field(default_factory=dict)
    texts: Mapping[int, OutputText] = field(default_factory=dict)
    finished: frozenset[int] = frozenset()
    num_prompt_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request that has been checked against the model's limits, with every default filled in.

    `n` is how many outputs are wanted, None for as many as there are sequences; if it is less, the likeliest are given.
    `hides_logprobs` when log-probabilities serve that ranking alone.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0
    n: int | None = None
    hides_logprobs: bool = False
    resumption: Resumption = Resumption()

    @property
    def key(self) -> str:
        return request_key(self.tenant, self.request_id)

    @property
    def num_outputs(self) -> int:
        return self.sampling.n if self.n is None else self.n

    @property
    def comes_whole(self) -> bool:
        """Whether no output is sent before all have ended, because only the best are sent."""
        return self.n is not None or self.sampling.beam_width > 0

    @property
    def is_complete(self) -> bool:
        """Whether the client holds everything already."""
        return len(self.resumption.finished) == self.num_outputs

    def text(self, tokenizer: Tokenizer | None) -> OutputText:
        """The text of an output without tokens."""
        return OutputText(
            tokenizer,
            self.prompt_token_ids,
            skip_special_tokens=self.skip_special_tokens,
            stop=self.stop,
            include_stop=self.include_stop_str_in_output,
            min_tokens=self.sampling.min_tokens,
        )


class RequestState:
    """A request in flight: its group in the scheduler, its text so far, its stream."""

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer | None,
        cache_root: bytes,
        statistics: Statistics,
        turns: Turns,
        unread: UnreadOutput,
    ) -> None:
        self.request = request
        self.expiry: asyncio.TimerHandle | None = None  # while no worker takes requests
        self.num_bytes = 0  # of the server's memory
        self._statistics = statistics
        self._queued_seconds: float | None = None
        self._first_token_seconds: float | None = None
        self._longest_pause_seconds = 0.0
        resumption = request.resumption
        self.group = SequenceGroup(
            request.key,
            request.prompt_token_ids,
            request.sampling,
            cache_root,
            priority=request.priority,
            tenant=request.tenant,
            arrived_at=time.monotonic(),
            output_token_ids=resumption.token_ids,
            ended=frozenset() if request.comes_whole else resumption.finished,
        )
        self.stream = OutputStream(request.num_outputs - len(resumption.finished), turns, unread)
        self._outputs = [resumption.texts.get(index) or request.text(tokenizer) for index in range(request.sampling.n)]
        self._last_token_at = [0.0] * request.sampling.n  # of each output, 0 before this server's first
        self._first_token_at = [0.0] * request.sampling.n
        self._num_prompt_logprobs = resumption.num_prompt_logprobs
        self._ranked = [_Ranked() for _ in range(request.sampling.n)] if request.n is not None else None
        # Whether every delta before the last has only a token and its text.
        self._is_plain = not (
            self._ranked
            or request.stop
            or request.sampling.logprobs is not None
            or request.sampling.prompt_logprobs is not None
        )

    def admitted(self, now: float) -> None:
        """A worker has been given the request, for the first time or again."""
        if self._queued_seconds is None:
            self._queued_seconds = now - self.group.arrived_at
            self._statistics.queue_seconds.observe(self._queued_seconds)
            self._statistics.num_prompt_tokens += len(self.request.prompt_token_ids)
            self._statistics.num_cached_tokens += self.num_cached_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the cache; of a resumed request it may have had output as well."""
        return min(self.group.num_cached_tokens or 0, len(self.request.prompt_token_ids))

    def _count_token(self, index: int, now: float) -> None:
        statistics, last = self._statistics, self._last_token_at[index]
        statistics.num_output_tokens += 1
        self._last_token_at[index] = now
        if last:
            pause = now - last
            statistics.token_seconds.observe(pause)
            if pause > self._longest_pause_seconds:
                self._longest_pause_seconds = pause
            return
        self._first_token_at[index] = now
        if self._first_token_seconds is None:
            self._first_token_seconds = now - self.group.arrived_at
            statistics.first_token_seconds.observe(self._first_token_seconds)

    @property
    def num_output_tokens(self) -> list[int]:
        """For each output, or for each sequence that the best outputs are chosen from."""
        if self.group.beams is not None:
            return [len(hypothesis.token_ids) for hypothesis in self.group.beams.hypotheses]
        return [sequence.num_output_tokens for sequence in self.group.sequences]

    def metrics(self, now: float) -> RequestMetrics:
        """What the request has waited for until now."""
        group = self.group
        num_pauses = 0
        if group.beams is None:
            num_resumed = sum(map(len, self.request.resumption.token_ids))
            num_outputs = sum(at > 0 for at in self._first_token_at)
            num_pauses = sum(self.num_output_tokens) - num_resumed - num_outputs
        return RequestMetrics(
            queued_seconds=self._queued_seconds,
            first_token_seconds=self._first_token_seconds,
            mean_pause_seconds=(
                (sum(self._last_token_at) - sum(self._first_token_at)) / num_pauses if num_pauses else None
            ),
            longest_pause_seconds=self._longest_pause_seconds if num_pauses else None,
            total_seconds=now - group.arrived_at,
            num_recompute_preemptions=group.num_recomputes,
            num_swap_preemptions=group.num_swaps,
            num_worker_changes=group.num_worker_changes,
            cached_tokens=self.num_cached_tokens,
        )

    def process(self, gained: SequenceOutput, now: float) -> bool:
        """Turn what a sequence gained into text on the stream; returns True when a stop string ended it."""
        sequence = gained.sequence
        if self.group.beams is not None:
            if self.group.is_finished:
                self._first_token_seconds = now - self.group.arrived_at
                self._statistics.num_output_tokens += sum(len(h.token_ids) for h in self.group.beams.hypotheses)
                self._put_hypotheses(self.group.beams.hypotheses[: self.request.num_outputs])
            return False
        if self._is_plain and gained.token_id is not None and sequence.status is SequenceStatus.RUNNING:
            self._count_token(sequence.index, now)
            shown, _ = self._outputs[sequence.index].step(gained.token_id)
            self.stream.put_token(sequence.index, gained.token_id, shown, sequence.num_output_tokens)
            return False
        if gained.prompt_logprobs:  # a preempted prompt is computed again; its positions count once
            new = gained.prompt_logprobs[max(0, self._num_prompt_logprobs + 1 - gained.prompt_start) :]
            self._num_prompt_logprobs += len(new)
            if new:
                self.stream.put_prompt_logprobs(new)
        if gained.token_id is None:
            return False
        self._count_token(sequence.index, now)
        delta = OutputDelta(sequence.index, token_ids=[gained.token_id], num_output_tokens=sequence.num_output_tokens)
        if gained.logprobs is not None:
            if self._ranked is not None:
                self._ranked[sequence.index].logprob += gained.logprobs.logprobs[0]
            if not self.request.hides_logprobs:
                delta.logprobs.append(gained.logprobs)
        text = self._outputs[sequence.index]
        hides = (
            sequence.status is SequenceStatus.FINISHED_STOPPED and not self.request.include_stop_str_in_output
        )  # the token that ended it is not text
        delta.text, stop = text.step(None if hides else gained.token_id)
        if stop is not None:
            delta.stop, delta.status = stop, SequenceStatus.FINISHED_STOPPED
        elif sequence.status.is_finished:
            delta.text += text.flush()
            delta.stop, delta.status = sequence.stop_token_id, sequence.status
        self._put(delta)
        return stop is not None

    def _put(self, delta: OutputDelta) -> None:
        """Put a delta on the stream, or keep it until all outputs have ended and the likeliest are known."""
        if self._ranked is None:
            self.stream.put(delta)
            return
        self.stream.count(delta.num_bytes + STRING_BYTES * len(delta.token_ids))
        self._ranked[delta.index].add(delta)
        if all(output.has_ended for output in self._ranked):
            best = sorted(self._ranked, key=lambda output: -output.mean_logprob)[: self.request.num_outputs]
            for index, output in enumerate(best):
                self._put_whole(index, output.whole)

    def _put_whole(self, index: int, output: WholeOutput) -> None:
        """Put a delta on the stream, without what the client has from an earlier stream."""
        resumption = self.request.resumption
        if index not in resumption.finished:
            self.stream.put_whole(output.deltas(index, resumption.begun.get(index, ())))

    def _put_hypotheses(self, hypotheses: Sequence[Hypothesis]) -> None:
        for index, hypothesis in enumerate(hypotheses):
            hides = hypothesis.is_stopped and not self.request.include_stop_str_in_output
            self._put_whole(
                index,
                WholeOutput(
                    hypothesis.token_ids,
                    self._outputs[index].texts(hypothesis.token_ids, hides_last=hides),
                    status=(
                        SequenceStatus.FINISHED_STOPPED
                        if hypothesis.is_stopped
                        else SequenceStatus.FINISHED_LENGTH_CAPPED
                    ),
                    stop=hypothesis.stop_token_id,
                ),
            )

    def abort(self) -> None:
        """End every output that is still open as aborted, with the text that was held back."""
        if self.group.beams is not None:  # beam search has no output before it has all
            for index in range(self.request.num_outputs):
                self._put_whole(index, WholeOutput())
            return
        for sequence, text in zip(self.group.sequences, self._outputs, strict=True):
            if sequence.status is SequenceStatus.FINISHED_ABORTED:
                self._put(
                    OutputDelta(
                        sequence.index,
                        text.flush(),
                        status=sequence.status,
                        num_output_tokens=sequence.num_output_tokens,
                    )
                )


class _Ranked:
    """An output that is kept until it is known whether it is among the likeliest."""

    def __init__(self) -> None:
        self.whole = WholeOutput()
        self.logprob = 0.0  # the sum over its tokens
        self.has_ended = False
        self._texts: list[str] = []
        self.whole.texts = self._texts

    def add(self, delta: OutputDelta) -> None:
        """A token and its text, or the end of the output."""
        if delta.token_ids:
            self.whole.token_ids += delta.token_ids
            self._texts.append(delta.text)
        elif self._texts:
            self._texts[-1] += delta.text
        self.whole.logprobs += delta.logprobs
        if delta.status is not None:
            self.whole.status, self.whole.stop, self.has_ended = delta.status, delta.stop, True

    @property
    def mean_logprob(self) -> float:
        return self.logprob / max(1, len(self.whole.token_ids))
