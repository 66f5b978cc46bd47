"""One request in a front end: what was asked for, and what its tokens mean as text."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import quote

from pagewire.v1.engine_service_pb2 import Hypothesis, Standing
from pagewire_common.calls.errors import RequestError
from scheduler_service.core import EncoderInput, PoolingParams, PoolingType, SequenceStatus
from scheduler_service.frontend.output.gained import Gained
from scheduler_service.frontend.output.output_failure import failure
from scheduler_service.frontend.output.request_memory import STRING_BYTES, UnreadOutput
from scheduler_service.frontend.output.streams import OutputDelta, OutputStream
from scheduler_service.frontend.output.turns import Turns
from scheduler_service.frontend.output.whole_output import WholeOutput
from scheduler_service.frontend.text.output_text import OutputText
from scheduler_service.frontend.text.tokenization import Tokenizer
from scheduler_service.statistics.counts import RequestCounts
from scheduler_service.statistics.finished_requests import RequestMetrics
from scheduler_service.wire.sampling import RequestSampling


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
    `hides_logprobs` when log-probabilities serve that ranking alone. `resumes` if it goes on with a broken stream.
    `is_whole` if its client is sent each output once it has ended. `adapter` is the fingerprint of a low-rank adapter;
    `encoder_input` what an encoder beside the decoder reads.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: RequestSampling
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    tenant: str = ""
    priority: int = 0
    n: int | None = None
    hides_logprobs: bool = False
    resumption: Resumption = Resumption()
    resumes: bool = False
    is_whole: bool = False
    adapter: str = ""
    encoder_input: EncoderInput | None = None

    @property
    def key(self) -> str:
        return request_key(self.tenant, self.request_id)

    @property
    def num_prompt_tokens(self) -> int:
        """Those that an encoder reads included."""
        return len(self.prompt_token_ids) + (self.encoder_input.num_tokens if self.encoder_input else 0)

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
            tokenizer if self.sampling.pooling is None else None,
            self.prompt_token_ids,
            skip_special_tokens=self.skip_special_tokens,
            stop=self.stop,
            include_stop=self.include_stop_str_in_output,
            min_tokens=self.sampling.min_tokens,
        )


class Trace(Protocol):
    """What a trace is told of the request that it is of."""

    def stands(self, standing: Standing) -> None: ...

    def gained_token(self, now: float) -> None: ...

    def end(self, at: float) -> None: ...


class RequestState:
    """A request in flight: its text so far, its stream, and what the engine told of it."""

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer | None,
        counts: RequestCounts,
        turns: Turns,
        unread: UnreadOutput,
    ) -> None:
        self.request = request
        self.arrived_at = time.monotonic()
        self.call = 0  # the number of its call, between front end and engine
        self.first_output = 0  # that of its first output
        self.standing = Standing()
        """Where it stands, as the engine told last."""
        self.trace: Trace | None = None
        self.counts = counts
        self._first_token_seconds: float | None = None
        self._longest_pause_seconds = 0.0
        self._num_hypothesis_tokens: list[int] | None = None
        resumption, num_sequences = request.resumption, request.sampling.n
        num_open = request.num_outputs - len(resumption.finished)
        self.stream = OutputStream(num_open, turns, unread, until_ended=request.is_whole)
        self._outputs = [resumption.texts.get(index) or request.text(tokenizer) for index in range(num_sequences)]
        self._num_tokens = [len(tokens) for tokens in resumption.token_ids] or [0] * num_sequences
        self._has_ended = [not request.comes_whole and index in resumption.finished for index in range(num_sequences)]
        self._last_token_at = [0.0] * num_sequences  # of each output, 0 before this server's first
        self._first_token_at = [0.0] * num_sequences
        self._num_prompt_logprobs = resumption.num_prompt_logprobs
        self._num_vector_bytes = 0
        self._ranked = [_Ranked() for _ in range(num_sequences)] if request.n is not None else None
        # Whether every delta before the last has only a token and its text.
        self._is_plain = not (
            self._ranked
            or request.stop
            or request.sampling.logprobs is not None
            or request.sampling.prompt_logprobs is not None
        )

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the cache; of a resumed request it may have had output as well."""
        return min(self.standing.cached_tokens, self.request.num_prompt_tokens)

    def _count_token(self, index: int, now: float) -> None:
        counts, last = self.counts, self._last_token_at[index]
        self._num_tokens[index] += 1
        self._last_token_at[index] = now
        if self.trace is not None:
            self.trace.gained_token(now)
        if last:
            pause = now - last
            counts.token_seconds.observe(pause)
            if pause > self._longest_pause_seconds:
                self._longest_pause_seconds = pause
            return
        self._first_token_at[index] = now
        if self._first_token_seconds is None:
            self._first_token_seconds = now - self.arrived_at
            counts.first_token_seconds.observe(self._first_token_seconds)

    @property
    def num_output_tokens(self) -> list[int]:
        """For each output, or for each sequence that the best outputs are chosen from."""
        if self.request.sampling.beam_width:
            return self._num_hypothesis_tokens or []
        return self._num_tokens

    @property
    def last_token_seconds(self) -> float:
        """When any output gained its last token so far, since the arrival; 0 or less if none has."""
        return max(self._last_token_at) - self.arrived_at

    def metrics(self, now: float) -> RequestMetrics:
        """What the request has waited for until now."""
        standing = self.standing
        num_pauses = 0
        if not self.request.sampling.beam_width:
            num_resumed = sum(map(len, self.request.resumption.token_ids))
            num_outputs = sum(at > 0 for at in self._first_token_at)
            num_pauses = sum(self._num_tokens) - num_resumed - num_outputs
        return RequestMetrics(
            queued_seconds=standing.queued_seconds if standing.HasField("queued_seconds") else None,
            first_token_seconds=self._first_token_seconds,
            mean_pause_seconds=(
                (sum(self._last_token_at) - sum(self._first_token_at)) / num_pauses if num_pauses else None
            ),
            longest_pause_seconds=self._longest_pause_seconds if num_pauses else None,
            total_seconds=now - self.arrived_at,
            num_recompute_preemptions=standing.num_recomputes,
            num_swap_preemptions=standing.num_swaps,
            num_worker_changes=standing.num_worker_changes,
            cached_tokens=self.num_cached_tokens,
        )

    # ---- what the engine tells

    def stands(self, standing: Standing) -> None:
        """The request stands there now."""
        if standing.HasField("queued_seconds") and not self.standing.HasField("queued_seconds"):
            self.counts.queue_seconds.observe(standing.queued_seconds)
        self.standing = standing
        if self.trace is not None:
            self.trace.stands(standing)

    def gain_token(self, index: int, token_id: int, now: float) -> bool:
        """An output gained a token and goes on; returns True when a stop string ended it.

        What it gains after that, while the engine is told, is no part of it.
        """
        if self._has_ended[index]:
            return False
        if self._is_plain:
            self._count_token(index, now)
            shown, _ = self._outputs[index].step(token_id)
            self.stream.put_token(index, token_id, shown, self._num_tokens[index])
            return False
        return self.gain(Gained(index, token_id), now)

    def gain(self, gained: Gained, now: float) -> bool:
        """An output gained whatever there is to gain; returns True when a stop string ended it."""
        index, token_id = gained.index, gained.token_id
        if self._has_ended[index]:
            return False
        if (error := failure(self.request.sampling, gained.status)) is not None:
            self._fail(index, gained.status, error)
            return False
        if gained.prompt_logprobs:  # a preempted prompt is computed again; its positions count once
            new = gained.prompt_logprobs[max(0, self._num_prompt_logprobs + 1 - gained.prompt_start) :]
            self._num_prompt_logprobs += len(new)
            if new:
                self.stream.put_prompt_logprobs(new)
        if (pooling := self.request.sampling.pooling) is not None:
            self._gain_vectors(gained, pooling, now)
            return False
        if token_id is None:
            return False
        self._count_token(index, now)
        delta = OutputDelta(index, token_ids=[token_id], num_output_tokens=self._num_tokens[index])
        if gained.logprobs is not None:
            if self._ranked is not None:
                self._ranked[index].logprob += gained.logprobs.logprobs[0]
            if not self.request.hides_logprobs:
                delta.logprobs.append(gained.logprobs)
        text = self._outputs[index]
        hides = gained.status is SequenceStatus.FINISHED_STOPPED and not self.request.include_stop_str_in_output
        delta.text, stop = text.step(None if hides else token_id)  # the token that ended it is not text
        if stop is not None:
            delta.stop, delta.status = stop, SequenceStatus.FINISHED_STOPPED
        elif gained.status is not None:
            delta.text += text.flush()
            delta.stop, delta.status = gained.stop_token_id, gained.status
        self._put(delta)
        return stop is not None

    def _fail(self, index: int, status: SequenceStatus | None, error: RequestError) -> None:
        """An output failed: it ends alone, unless its request is for nothing else."""
        if (self.request.num_outputs == 1 and self._ranked is None) or self.request.sampling.beam_width:
            self.stream.fail(error)
        else:
            text = self._outputs[index].flush()
            self._put(OutputDelta(index, text, status=status, num_output_tokens=self._num_tokens[index]))

    def _gain_vectors(self, gained: Gained, pooling: PoolingParams, now: float) -> None:
        """Those of tokens come again when a preempted prompt is computed again; they count once."""
        vectors = gained.vectors
        if pooling.type is PoolingType.ALL:
            start = (gained.prompt_start - 1) * pooling.vector_bytes
            vectors = vectors[max(0, self._num_vector_bytes - start) :]
            self._num_vector_bytes += len(vectors)
        if gained.status is not None and self.trace is not None:
            self.trace.end(now)
        if vectors or gained.status is not None:
            self._put(OutputDelta(gained.index, vectors=vectors, status=gained.status))

    def gain_hypotheses(self, hypotheses: Sequence[Hypothesis], now: float) -> None:
        """A beam search is over."""
        self._first_token_seconds = now - self.arrived_at
        self._num_hypothesis_tokens = [len(hypothesis.token_ids) for hypothesis in hypotheses]
        for index, hypothesis in enumerate(hypotheses[: self.request.num_outputs]):
            hides = hypothesis.is_stopped and not self.request.include_stop_str_in_output
            self._put_whole(
                index,
                WholeOutput(
                    list(hypothesis.token_ids),
                    self._outputs[index].texts(hypothesis.token_ids, hides_last=hides),
                    status=(
                        SequenceStatus.FINISHED_STOPPED
                        if hypothesis.is_stopped
                        else SequenceStatus.FINISHED_LENGTH_CAPPED
                    ),
                    stop=hypothesis.stop_token_id if hypothesis.HasField("stop_token_id") else None,
                ),
            )

    def abort(self) -> None:
        """End every output that is still open as aborted, with the text that was held back."""
        if self.request.sampling.beam_width:  # beam search has no output before it has all
            for index in range(self.request.num_outputs):
                self._put_whole(index, WholeOutput())
            return
        for index, text in enumerate(self._outputs):
            if not self._has_ended[index]:
                status = SequenceStatus.FINISHED_ABORTED
                num_tokens = self._num_tokens[index]
                self._put(OutputDelta(index, text.flush(), status=status, num_output_tokens=num_tokens))

    # ---- to the stream

    def _put(self, delta: OutputDelta) -> None:
        """Put a delta on the stream, or keep it until all outputs have ended and the likeliest are known."""
        self._has_ended[delta.index] = delta.status is not None
        if self._ranked is None:
            self.stream.put(delta)
            return
        self.stream.count(delta.num_bytes + STRING_BYTES * len(delta.token_ids))
        self._ranked[delta.index].add(delta)
        if all(self._has_ended):
            best = sorted(self._ranked, key=_Ranked.place)[: self.request.num_outputs]
            error = failure(self.request.sampling, best[0].whole.status)
            if error is not None and len(best) == 1:
                self.stream.fail(error)
                return
            for index, output in enumerate(best):
                self._put_whole(index, output.whole)

    def _put_whole(self, index: int, output: WholeOutput) -> None:
        """Put a delta on the stream, without what the client has from an earlier stream."""
        resumption = self.request.resumption
        if index not in resumption.finished:
            self.stream.put_whole(output.deltas(index, resumption.begun.get(index, ())))


class _Ranked:
    """An output that is kept until it is known whether it is among the likeliest."""

    def __init__(self) -> None:
        self.whole = WholeOutput()
        self.logprob = 0.0  # the sum over its tokens
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
            self.whole.status, self.whole.stop = delta.status, delta.stop

    def place(self) -> tuple[bool, float]:
        """The likeliest comes first, by its mean log-probability; outputs that failed come last."""
        return self.whole.status.has_failed, -self.logprob / max(1, len(self.whole.token_ids))
