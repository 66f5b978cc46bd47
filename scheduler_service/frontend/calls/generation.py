"""Serves Generate calls: admission, checks, submission to the engine, and outputs to the client."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc
import structlog

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.admin_service_pb2 import FinishedRequest
from pagewire_common.calls.errors import PatientWriter, RequestError
from pagewire_common.calls.request_limits import request_size
from scheduler_service.access.caller import caller, tenant_of
from scheduler_service.core import SequenceStatus
from scheduler_service.frontend.checking.chat import MESSAGES_AT_ONCE, has_images
from scheduler_service.frontend.checking.checks import check_context, check_names, check_place, check_sizes
from scheduler_service.frontend.checking.prompt import encode_prompt, read_encoder_prompt
from scheduler_service.frontend.checking.resumption import check_resumption
from scheduler_service.frontend.checking.sampling_validation import check_sampling, read_sampling
from scheduler_service.frontend.link.engine_call import EngineCall
from scheduler_service.frontend.link.engine_link import EngineLink
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.request import GenerationRequest, request_key
from scheduler_service.frontend.output.request_memory import (
    NUMBER_BYTES,
    SOUND_BYTES,
    more_memory,
    prompt_logprob_bytes,
    request_bytes,
    sample_bytes,
)
from scheduler_service.frontend.output.request_state import RequestState
from scheduler_service.frontend.output.request_trace import CallTrace, RequestTrace, recorded
from scheduler_service.frontend.output.streams import OutputDelta
from scheduler_service.frontend.text.output_text import ReasoningMarks
from scheduler_service.statistics.counts import RequestCounts, RequestMetrics

Context = grpc.aio.ServicerContext[Any, Any]

REASONS = {
    SequenceStatus.FINISHED_STOPPED: "stop",
    SequenceStatus.FINISHED_LENGTH_CAPPED: "length",
    SequenceStatus.FINISHED_ABORTED: "abort",
    SequenceStatus.FINISHED_FAILED: "error",
    SequenceStatus.FINISHED_BARRED: "error",
}

_CLIENTS_OWN = (grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED)
"""Statuses of a stream that the client left, or resumed in another call."""


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """Properties of a chat's output that a request has no fields for.

    `make_form`: compiles the output form, which depends on the end of the rendered chat. `find_reasoning`: the marks of
    the model's reasoning, which depend on the same. `fits_max_tokens`: `max_tokens` beyond the context is lowered.
    """

    make_form: Callable[[str], Awaitable[str]] | None = None
    find_reasoning: Callable[[str], ReasoningMarks | None] = lambda _: None
    fits_max_tokens: bool = False


NO_CHAT = ChatOutput()


class Answers(Protocol):
    def encode(self, delta: OutputDelta) -> Iterable[Any]:
        """The messages that this delta completes, in order. May raise RequestError."""


async def generate(
    link: EngineLink,
    request: pb.GenerateRequest,
    context: Context,
    make_answers: Callable[[RequestState, ServedModel], Answers],
    *,
    operation: str,
    output: ChatOutput = NO_CHAT,
) -> None:
    """Serve a request until the call ends. Raises RequestError."""
    record = _Record()
    with (
        recorded("request closed", operation, request, context, link.tracer, record.figures) as trace,
        EngineCall(link) as call,
    ):
        check_names(request)
        check_sizes(request)
        if (api_key := caller.get()) is not None:
            request.tenant = tenant_of(request.tenant)
            api_key.check_adapter(request.lora_name)
        request_id = request.request_id or uuid.uuid4().hex
        structlog.contextvars.bind_contextvars(request_id=request_id)
        if len(request.chat.messages) > MESSAGES_AT_ONCE:
            await asyncio.sleep(0)  # counting the fields of 4,096 messages took 12 ms, and their memory takes 11 ms
        known = link.loading.model
        admitted_bytes = request_bytes(request, request_size.get())
        key = request_key(request.tenant, request_id)
        resumes = request.HasField("resume")
        has_sound = request.HasField("encoder_sound")
        later_bytes = SOUND_BYTES if has_sound else 0
        if known is None or known.sounds is not None:
            later_bytes += sample_bytes(request)
        adapter_id = await call.admit_early(
            key, admitted_bytes, later_bytes=later_bytes, resumes=resumes, adapter_name=request.lora_name
        )
        model = await allowed_model(link)
        has_form = output.make_form is not None or request.sampling.WhichOneof("constraint") is not None
        if has_sound or has_form or request.HasField("parts") or has_images(request):  # these take long to check
            await call.admitted()
        holds = more_memory.set(call.hold)
        try:
            checked = replace(await check_request(request, request_id, model, output), adapter_id=adapter_id)
            if resumes:
                checked = await check_resumption(request, checked, model)
        except RequestError:
            await call.admitted()  # if the engine refuses the call, the client learns this reason
            raise
        finally:
            more_memory.reset(holds)  # the call would refer to itself, and stay until the garbage collector finds it
        more_bytes = prompt_logprob_bytes(checked.sampling.prompt_logprobs, len(checked.prompt_token_ids))
        more_bytes += NUMBER_BYTES * model.defaults.num_listed
        state = await call.submit(checked, model, more_bytes, _described(trace, checked, model))
        if checked.is_complete:
            return
        record.state = state
        try:
            with _counting(state, record.ended):
                await _write(
                    state, make_answers(state, model), record.ended, PatientWriter(context, link.stall_timeout)
                )
        finally:
            call.finished = record.finished()
        await call.close()


async def check_request(
    message: pb.GenerateRequest, request_id: str, model: ServedModel, output: ChatOutput = NO_CHAT
) -> GenerationRequest:
    """Make all checks except those of `check_sizes`, cheap checks first. Raises RequestError."""
    if not model.generates:
        reason = "this model generates no text; use Embed or Score"
        raise RequestError(grpc.StatusCode.UNIMPLEMENTED, reason)
    check_place(message, model)
    sampling = message.sampling
    check_sampling(sampling, model)
    encoder_input = await read_encoder_prompt(message, model)
    prompt, prompt_end, items = await encode_prompt(message, model)
    check_context("the prompt", len(prompt), model)
    grammar = await output.make_form(prompt_end) if output.make_form is not None else ""
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        prompt_end=prompt_end,
        reasoning=output.find_reasoning(prompt_end),
        sampling=await read_sampling(sampling, prompt, model, grammar, fits_max_tokens=output.fits_max_tokens),
        n=(sampling.n or 1) if sampling.best_of > (sampling.n or 1) else None,
        hides_logprobs=not sampling.HasField("logprobs"),
        stop=tuple(sampling.stop) or model.defaults.stop,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        cache_salt=message.cache_salt,
        tenant=message.tenant,
        priority=message.priority,
        encoder_input=encoder_input,
        items=items,
        skip_special_tokens=sampling.skip_special_tokens if sampling.HasField("skip_special_tokens") else True,
    )


def _described(trace: CallTrace | None, request: GenerationRequest, model: ServedModel) -> RequestTrace | None:
    if trace is None:
        return None
    trace.describe(model.name, request.tenant, request.priority)
    trace.describe_sampling(request)
    return trace.request()


async def allowed_model(link: EngineLink) -> ServedModel:
    """The served model. Raises UNAVAILABLE, and PERMISSION_DENIED if the API key may not use the model."""
    model = await link.model()
    if (key := caller.get()) is not None:
        key.check_model(model.name)
    return model


async def _write(state: RequestState, answers: Answers, ended: list[str], writer: PatientWriter) -> None:
    state.stream.when_cut = writer.give_up
    try:
        async for delta in state.stream:
            for message in answers.encode(delta):
                await writer.write(message)
            if delta.status is not None:
                ended.append(REASONS[delta.status])
    finally:
        writer.close()


@contextlib.contextmanager
def _counting(state: RequestState, ended: list[str]) -> Iterator[None]:
    """Count the finish reasons. If a call ends early, its open outputs count as errors or aborts."""
    counts, num_outputs = state.counts, state.stream.num_open
    try:
        yield
        _count_ended(state, counts)
    except BaseException as error:
        failed = isinstance(error, RequestError) and error.code not in _CLIENTS_OWN
        ended += ["error" if failed else "abort"] * (num_outputs - len(ended))
        raise
    finally:
        counts.num_outputs.update(ended)
        counts.finished(state.request.num_prompt_tokens, sum(state.num_output_tokens))


def _count_ended(state: RequestState, counts: RequestCounts) -> None:
    request, figures = state.request, state.metrics(time.monotonic())
    counts.request_seconds.observe(figures.total_seconds)
    counts.prompt_tokens.observe(request.num_prompt_tokens)
    counts.params_n.observe(request.num_outputs)
    counts.params_max_tokens.observe(request.sampling.max_tokens)
    for num_tokens in state.num_output_tokens:
        counts.output_tokens.observe(num_tokens)
    queued, first = figures.queued_seconds, figures.first_token_seconds
    if queued is not None and first is not None:
        last = max(first, state.times.last_token_seconds)
        counts.prefill_seconds.observe(max(0.0, first - queued))
        counts.decode_seconds.observe(last - first)
        counts.inference_seconds.observe(max(0.0, last - queued))
    if figures.mean_pause_seconds is not None:
        counts.mean_token_seconds.observe(figures.mean_pause_seconds)


class _Record:
    def __init__(self) -> None:
        self.state: RequestState | None = None
        self.ended: list[str] = []
        self._metrics: RequestMetrics | None = None

    def finished(self) -> FinishedRequest:
        state = self.state
        assert state is not None
        self._metrics = state.metrics(time.monotonic())
        return FinishedRequest(
            request_id=state.request.request_id,
            tenant=state.request.tenant,
            finish_reasons=self.ended,
            prompt_tokens=state.request.num_prompt_tokens,
            output_tokens=sum(state.num_output_tokens),
            metrics=self._metrics.encode(),
        )

    def figures(self) -> dict[str, Any]:
        if self.state is None or self._metrics is None:
            return {}
        return {
            "request_id": self.state.request.request_id,
            "prompt_tokens": self.state.request.num_prompt_tokens,
            "output_tokens": self.state.num_output_tokens,
            "finish_reasons": self.ended,
            **self._metrics.known(),
        }
