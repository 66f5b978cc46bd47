"""The state of a request in flight: receives tokens from the engine, decodes text, and fills the client's stream."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.v1 import engine_service_pb2 as pb
from pagewire.v1 import scheduler_output_pb2 as wire
from pagewire.v1.engine_service_pb2 import Hypothesis, Standing
from pagewire.v1.sequence_group_pb2 import SequenceStatus as Status
from pagewire_common.calls.errors import RequestError
from scheduler_service.core import PoolingParams, PoolingType, SequenceStatus
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.frontend.output.request import GenerationRequest, failure
from scheduler_service.frontend.output.request_memory import STRING_BYTES, UnreadOutput
from scheduler_service.frontend.output.request_trace import RequestTrace
from scheduler_service.frontend.output.streams import OutputDelta, OutputStream, Turns
from scheduler_service.frontend.output.whole_output import RankedOutput, WholeOutput
from scheduler_service.frontend.text.tokenization import Tokenizer
from scheduler_service.statistics.counts import RequestCounts, RequestMetrics, TokenTimes
from scheduler_service.wire.messages import decode_enum


@dataclass(slots=True)
class Gained:
    """The data that an output gains in one step.

    `token_id`: None in a step that computes only prompt tokens.
    `prompt_logprobs`: log-probabilities of the prompt's positions from `prompt_start` on.
    `vectors`: the new vectors; if each token has a vector, the first is at position `prompt_start` - 1.
    """

    index: int
    token_id: int | None
    status: SequenceStatus | None = None
    stop_token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    prompt_start: int = 0
    vectors: bytes = b""


def decode_gained(message: pb.OutputGained) -> Gained:
    logprobs = _decode_logprobs(message.logprobs)
    return Gained(
        message.index,
        message.token_id if message.HasField("token_id") else None,
        decode_enum(SequenceStatus, Status.DESCRIPTOR, message.status) if message.status else None,
        message.stop_token_id if message.HasField("stop_token_id") else None,
        logprobs[0] if logprobs else None,
        _decode_logprobs(message.prompt_logprobs),
        message.prompt_start,
        message.vectors,
    )


def _decode_logprobs(columns: wire.SampleLogprobs) -> list[TokenLogprobs]:
    width, token_ids, logprobs = columns.width, list(columns.token_ids), list(columns.logprobs)
    return [
        TokenLogprobs(token_ids[at * width : (at + 1) * width], logprobs[at * width : (at + 1) * width], rank)
        for at, rank in enumerate(columns.ranks)
    ]


class RequestState:
    """A request in flight: its text so far, the client's stream, and its state in the engine."""

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer | None,
        counts: RequestCounts,
        turns: Turns,
        unread: UnreadOutput,
    ) -> None:
        self.request = request
        # numbers of the call and of the first output, assigned by the registry
        self.call = 0
        self.first_output = 0
        self.standing = Standing()
        """The engine's latest message about the request's place, preemptions and tokens."""
        self.trace: RequestTrace | None = None
        self.counts = counts
        self._num_hypothesis_tokens: list[int] | None = None
        resumption, num_sequences = request.resumption, request.sampling.n
        num_open = request.num_outputs - len(resumption.finished)
        self.stream = OutputStream(num_open, turns, unread)
        self.times = TokenTimes(counts, [len(tokens) for tokens in resumption.token_ids] or [0] * num_sequences)
        resumed = resumption.token_ids or ((),) * num_sequences
        self._token_ids = [array("I", tokens) for tokens in resumed]
        self._texts = [resumption.texts.get(index) or request.text(tokenizer) for index in range(num_sequences)]
        self._has_ended = [not request.comes_whole and index in resumption.finished for index in range(num_sequences)]
        self._num_prompt_logprobs = resumption.num_prompt_logprobs
        self._num_vector_bytes = 0
        self._ranked = [RankedOutput() for _ in range(num_sequences)] if request.n is not None else None
        self._is_plain = request.is_plain
        self._has_hypotheses = False

    @property
    def is_over(self) -> bool:
        """Whether the engine has nothing to add."""
        return self._has_hypotheses or all(self._has_ended) or self.stream.has_failed

    @property
    def ended(self) -> list[int]:
        """The indices of outputs that have ended."""
        return [index for index, has_ended in enumerate(self._has_ended) if has_ended]

    @property
    def begun(self) -> "list[array[int]]":
        """The tokens of each output that has not ended; empty if none has any."""
        open_ones = [array("I") if ended else ids for ids, ended in zip(self._token_ids, self._has_ended, strict=True)]
        return open_ones if any(open_ones) else []

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether the log-probabilities of all the prompt's positions have arrived."""
        return 0 < self._num_prompt_logprobs >= len(self.request.prompt_token_ids) - 1

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, without a resumed request's output tokens."""
        return min(self.standing.cached_tokens, self.request.num_prompt_tokens)

    @property
    def num_output_tokens(self) -> list[int]:
        """Number of tokens of each output; with best_of or beam search, also of sequences that are not sent."""
        if self.request.sampling.beam_width:
            return self._num_hypothesis_tokens or []
        return self.times.num_tokens

    def metrics(self, now: float) -> RequestMetrics:
        standing, times = self.standing, self.times
        return RequestMetrics(
            queued_seconds=standing.queued_seconds if standing.HasField("queued_seconds") else None,
            first_token_seconds=times.first_token_seconds,
            mean_pause_seconds=times.mean_pause_seconds,
            longest_pause_seconds=times.longest_pause_seconds if times.num_pauses else None,
            total_seconds=now - times.arrived_at,
            num_recompute_preemptions=standing.num_recomputes,
            num_swap_preemptions=standing.num_swaps,
            num_worker_changes=standing.num_worker_changes,
            cached_tokens=self.num_cached_tokens,
        )

    # ---- messages from the engine

    def stands(self, standing: Standing) -> None:
        if standing.HasField("queued_seconds") and not self.standing.HasField("queued_seconds"):
            self.counts.queue_seconds.observe(standing.queued_seconds)
        self.standing = standing
        if self.trace is not None:
            self.trace.stands(standing)

    def gain_token(self, index: int, token_id: int, now: float) -> bool:
        """Add a token to an unfinished output. Returns True if a stop string ended the output."""
        if self._has_ended[index]:
            return False
        if self._is_plain:
            num_tokens = self.times.count(index, now)
            if self.trace is not None:
                self.trace.gained_token(now)
            self._token_ids[index].append(token_id)
            shown, _ = self._texts[index].step(token_id)
            self.stream.put_token(index, token_id, shown, num_tokens)
            return False
        return self.gain(Gained(index, token_id), now)

    def gain(self, gained: Gained, now: float) -> bool:
        """Add the data that an output gained in one step. Returns True if a stop string ended the output."""
        index, token_id = gained.index, gained.token_id
        if self._has_ended[index]:
            return False
        if (error := failure(self.request.sampling, gained.status)) is not None:
            self._fail(index, gained.status, error)
            return False
        if gained.prompt_logprobs:  # after a preemption, the engine sends positions again
            new = gained.prompt_logprobs[max(0, self._num_prompt_logprobs + 1 - gained.prompt_start) :]
            self._num_prompt_logprobs += len(new)
            if new:
                self.stream.put_prompt_logprobs(new)
        if (pooling := self.request.sampling.pooling) is not None:
            self._gain_vectors(gained, pooling, now)
            return False
        if token_id is None:
            return False
        self._token_ids[index].append(token_id)
        delta = OutputDelta(index, token_ids=[token_id], num_output_tokens=self.times.count(index, now))
        if self.trace is not None:
            self.trace.gained_token(now)
        if gained.logprobs is not None:
            if self._ranked is not None:
                self._ranked[index].logprob += gained.logprobs.logprobs[0]
            if not self.request.hides_logprobs:
                delta.logprobs.append(gained.logprobs)
        text = self._texts[index]
        hides = gained.status is SequenceStatus.FINISHED_STOPPED and not self.request.include_stop_str_in_output
        delta.text, stop = text.step(None if hides else token_id)  # the token that ends an output has no text
        if stop is not None:
            delta.stop, delta.status = stop, SequenceStatus.FINISHED_STOPPED
        elif gained.status is not None:
            delta.text += text.flush()
            delta.stop, delta.status = gained.stop_token_id, gained.status
        self._put(delta)
        return stop is not None

    def _fail(self, index: int, status: SequenceStatus | None, error: RequestError) -> None:
        """End a failed output. A request's only output or a beam search fails as a whole."""
        if (self.request.num_outputs == 1 and self._ranked is None) or self.request.sampling.beam_width:
            self.stream.fail(error)
        else:
            text = self._texts[index].flush()
            self._put(OutputDelta(index, text, status=status, num_output_tokens=self.times.num_tokens[index]))

    def _gain_vectors(self, gained: Gained, pooling: PoolingParams, now: float) -> None:
        """Add vectors to an output, without those computed again after a preemption."""
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
        self._has_hypotheses = True
        self.times.first_token_seconds = now - self.times.arrived_at
        self._num_hypothesis_tokens = [len(hypothesis.token_ids) for hypothesis in hypotheses]
        for index, hypothesis in enumerate(hypotheses[: self.request.num_outputs]):
            hides = hypothesis.is_stopped and not self.request.include_stop_str_in_output
            self._put_whole(
                index,
                WholeOutput(
                    list(hypothesis.token_ids),
                    self._texts[index].texts(hypothesis.token_ids, hides_last=hides),
                    status=(
                        SequenceStatus.FINISHED_STOPPED
                        if hypothesis.is_stopped
                        else SequenceStatus.FINISHED_LENGTH_CAPPED
                    ),
                    stop=hypothesis.stop_token_id if hypothesis.HasField("stop_token_id") else None,
                ),
            )

    def abort(self) -> None:
        if self.request.sampling.beam_width:  # beam search sends nothing before its end
            self._has_hypotheses = True
            for index in range(self.request.num_outputs):
                self._put_whole(index, WholeOutput())
            return
        for index, text in enumerate(self._texts):
            if not self._has_ended[index]:
                status = SequenceStatus.FINISHED_ABORTED
                num_tokens = self.times.num_tokens[index]
                self._put(OutputDelta(index, text.flush(), status=status, num_output_tokens=num_tokens))

    # ---- deltas to the stream

    def _put(self, delta: OutputDelta) -> None:
        """Put a delta on the stream. With best_of, keep the delta until all outputs have ended and are ranked."""
        self._has_ended[delta.index] = delta.status is not None
        if self._ranked is None:
            self.stream.put(delta)
            return
        self.stream.count(delta.num_bytes + STRING_BYTES * len(delta.token_ids))
        self._ranked[delta.index].add(delta)
        if all(self._has_ended):
            best = sorted(self._ranked, key=RankedOutput.place)[: self.request.num_outputs]
            error = failure(self.request.sampling, best[0].whole.status)
            if error is not None and len(best) == 1:
                self.stream.fail(error)
                return
            for index, output in enumerate(best):
                self._put_whole(index, output.whole)

    def _put_whole(self, index: int, output: WholeOutput) -> None:
        """Put a complete output on the stream, without tokens that the client already has."""
        resumption = self.request.resumption
        if index not in resumption.finished:
            self.stream.put_whole(output.deltas(index, resumption.begun.get(index, ())))
