"""Calls split into parts (texts, windows of a sound): requests of one admission, whose memory counts for the call."""

import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.access.caller import caller, tenant_of
from scheduler_service.core import EncoderInput
from scheduler_service.frontend.calls.generation import Context, allowed_model
from scheduler_service.frontend.checking.checks import check_characters, check_place
from scheduler_service.frontend.link.engine_call import EngineCall
from scheduler_service.frontend.link.engine_link import EngineLink
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.request import GenerationRequest, request_key
from scheduler_service.frontend.output.request_state import RequestState
from scheduler_service.frontend.output.request_trace import recorded
from scheduler_service.wire.sampling import RequestSampling

Request = pb.EmbedRequest | pb.ScoreRequest | pb.TranscribeRequest


class PartedCall:
    """A call from admission to end, as an `async with` block. Raises RequestError for a refused call."""

    model: ServedModel
    event = ""
    operation = ""
    later_bytes = 0
    """Bytes of memory that the call takes after its admission, without the parts."""

    def __init__(self, link: EngineLink, request: Request, context: Context, num_bytes: int) -> None:
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self._num_parts = 0
        self._link = link
        self._request = request
        self._context = context
        self._num_bytes = num_bytes
        self._id = uuid.uuid4().hex
        self._open = contextlib.ExitStack()

    async def __aenter__(self) -> Self:
        request = self._request
        with contextlib.ExitStack() as stack:
            self._trace = stack.enter_context(
                recorded(self.event, self.operation, request, self._context, self._link.tracer, self._known)
            )
            check_characters("tenant", request.tenant)
            check_characters("lora_name", request.lora_name)
            self._check()
            request.tenant = tenant_of(request.tenant)
            if (api_key := caller.get()) is not None:
                api_key.check_adapter(request.lora_name)
            self._call = stack.enter_context(EngineCall(self._link))
            key = request_key(request.tenant, self._id)
            self._adapter_id = await self._call.admit(
                key, self._num_bytes, later_bytes=self.later_bytes, adapter_name=request.lora_name
            )
            self.model = await allowed_model(self._link)
            check_place(request, self.model)
            if self._trace is not None:
                self._trace.describe(self.model.name, request.tenant, request.priority)
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def _check(self) -> None:
        """Cheap checks of the request, which need no model. Raises RequestError."""

    @contextlib.asynccontextmanager
    async def part(
        self,
        number: int,
        prompt_token_ids: Sequence[int],
        sampling: RequestSampling,
        encoder_input: EncoderInput | None = None,
    ) -> AsyncIterator[RequestState]:
        """Submit a part. Read the part's stream inside the `with` block. Raises RequestError."""
        request = self._request
        checked = GenerationRequest(
            request_id=f"{self._id}-{number}",
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            priority=request.priority,
            adapter_id=self._adapter_id,
            encoder_input=encoder_input,
        )
        with EngineCall(self._link) as call:
            trace = self._trace.request(part=number) if self._trace is not None else None
            state = await call.submit(checked, self.model, trace=trace, part_of=self._call)
            yield state
        if trace is not None:
            trace.end(time.monotonic())
        num_tokens, num_output_tokens = checked.num_prompt_tokens, sum(state.num_output_tokens)
        self._num_parts += 1
        self.num_tokens += num_tokens
        self.num_cached_tokens += state.num_cached_tokens
        self.num_output_tokens += num_output_tokens
        state.counts.finished(num_tokens, num_output_tokens)

    def _known(self) -> dict[str, Any]:
        return {"request_id": self._id, "prompt_tokens": self.num_tokens, **self._figures()}

    def _figures(self) -> dict[str, Any]:
        return {}
