"""Converts between pagewire's protocol and vLLM's engine protocol, which gateways for OpenAI's HTTP API use.

The gateway tokenizes prompts and detokenizes outputs, so requests and answers contain token ids. A gateway sets all
fields that are not `optional`. If 0 is not a valid value of such a field, 0 means vLLM's default.
"""

from collections.abc import Iterator, Mapping

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.sampling import NUMBERS
from scheduler_service.core import SequenceStatus
from scheduler_service.core.outputs import TokenLogprobs
from scheduler_service.frontend.calls.generation import REASONS
from scheduler_service.frontend.checking.checks import invalid
from scheduler_service.frontend.output.request_state import RequestState
from scheduler_service.frontend.output.streams import OutputDelta

MAX_BYTES = 4 << 20
"""Largest number of bytes of an output that is sent as one message. gRPC libraries refuse larger messages by default.
"""
TOKEN_BYTES = 4
LOGPROB_BYTES = 9
POSITION_BYTES = 16

_AS_THEY_ARE = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
_OPTIONAL = ("max_tokens", "logprobs")
_NUMBERS: Mapping[str, float] = {"n": 1} | {
    name: number.default
    for name, number in NUMBERS.items()
    if (known := vllm.SamplingParams.DESCRIPTOR.fields_by_name.get(name)) and not known.has_presence
}
"""Numeric fields with vLLM's defaults. A 0 in a field means vLLM's default if 0 is not a valid value of the field."""
_NOT_SERVED = ("kv_transfer_params", "mm_inputs", "kv_transfer_params_json", "media_refs")
_FORMS = ("json_schema", "regex", "grammar")


def decode_request(message: vllm.GenerateRequest) -> pb.GenerateRequest:
    """Convert a request to pagewire's protocol. Raises RequestError for fields that this protocol cannot express."""
    for name in _NOT_SERVED:
        if message.HasField(name):
            invalid(f"{name} is not supported by this server")
    if message.extra_mm_inputs:
        invalid("extra_mm_inputs is not supported by this server")
    request = pb.GenerateRequest(
        request_id=message.request_id, sampling=_decode_sampling_params(message.sampling_params)
    )
    if message.HasField("tokenized"):
        request.token_ids.ids.MergeFrom(message.tokenized.input_ids)
    elif message.HasField("text"):
        request.text = message.text
    return request


def _decode_sampling_params(params: vllm.SamplingParams) -> pb.SamplingParams:
    for name in ("truncate_prompt_tokens", "prompt_logprobs"):
        if params.HasField(name):
            invalid(f"sampling_params.{name} is not supported by this server")
    if params.logprobs < 0:
        invalid(f"sampling_params.logprobs is {params.logprobs}; log-probabilities of all tokens are not supported")
    if any(token_id < 0 for token_id in params.logit_bias):
        invalid(f"sampling_params.logit_bias has the token {min(params.logit_bias)}")
    sampling = pb.SamplingParams(
        # An absent temperature means vLLM's default.
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        seed=params.seed & (1 << 64) - 1 if params.HasField("seed") else None,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        logit_bias=params.logit_bias,
    )
    for name in _AS_THEY_ARE:
        setattr(sampling, name, getattr(params, name))
    for name in _OPTIONAL:
        if params.HasField(name):
            setattr(sampling, name, getattr(params, name))
    for name, default in _NUMBERS.items():
        setattr(sampling, name, getattr(params, name) or default)
    if params.min_tokens:  # gateways send 0 for an absent field, so 0 means the model's default
        sampling.min_tokens = params.min_tokens
    constraint = params.WhichOneof("constraint")
    if constraint in _FORMS:
        setattr(sampling, constraint, getattr(params, constraint))
    elif constraint == "json_object":
        sampling.json_schema = '{"type": "object"}'
    elif constraint == "choice":
        sampling.choice.options.extend(params.choice.choices)
    elif constraint:
        invalid(f"sampling_params.{constraint} is not supported by this server")
    return sampling


class StreamedAnswers:
    """Converts deltas to a chunk for each new token, and to an empty completion message at the end of each output.

    A chunk has only one token because of the gateway smg 1.13: smg loses the text behind the token that ends thinking
    if both are in the same chunk.
    """

    def __init__(self, state: RequestState) -> None:
        self._state = state

    def encode(self, delta: OutputDelta) -> Iterator[vllm.GenerateResponse]:
        num_before = delta.num_output_tokens - len(delta.token_ids)
        for number, token_id in enumerate(delta.token_ids):
            chunk = vllm.GenerateStreamChunk(
                token_ids=[token_id],
                prompt_tokens=self._state.request.num_prompt_tokens,
                completion_tokens=num_before + number + 1,
                cached_tokens=self._state.num_cached_tokens,
                index=delta.index,
            )
            if delta.logprobs:
                _add_logprobs(chunk.output_logprobs, delta.logprobs[number : number + 1])
            yield vllm.GenerateResponse(chunk=chunk)
        if delta.status is not None:
            yield vllm.GenerateResponse(complete=_end(vllm.GenerateComplete(), self._state, delta, delta.status))


class WholeAnswers:
    """Converts deltas to one message for each output.

    The message of an output is sent after all earlier outputs have ended, because gateways number outputs in order of
    arrival. Each delta extends the output's message a little, so that no delta blocks the event loop for long.
    """

    def __init__(self, state: RequestState) -> None:
        self._state = state
        self._outputs = [vllm.GenerateComplete() for _ in range(state.request.num_outputs)]
        self._num_bytes = [0] * len(self._outputs)
        self._num_written = 0

    def encode(self, delta: OutputDelta) -> Iterator[vllm.GenerateResponse]:
        """Add a delta, and return the messages of outputs that can be sent.

        Raises INVALID_ARGUMENT if an output is too large.
        """
        self._state.stream.keep(delta)
        self._num_bytes[delta.index] += TOKEN_BYTES * len(delta.token_ids) + _logprob_bytes(delta.logprobs)
        if self._num_bytes[delta.index] > MAX_BYTES:
            invalid(
                f"output {delta.index} has more than {MAX_BYTES >> 20} MiB, which a gateway would not read; ask for "
                "fewer log-probabilities, or for a stream"
            )
        output = self._outputs[delta.index]
        output.output_ids.extend(delta.token_ids)
        if delta.logprobs:
            _add_logprobs(output.output_logprobs, delta.logprobs)
        if delta.status is not None:
            _end(output, self._state, delta, delta.status)
        while self._num_written < len(self._outputs) and self._outputs[self._num_written].finish_reason:
            yield vllm.GenerateResponse(complete=self._outputs[self._num_written])
            self._num_written += 1


def _logprob_bytes(entries: list[TokenLogprobs]) -> int:
    return len(entries) * (POSITION_BYTES + LOGPROB_BYTES * len(entries[0].token_ids)) if entries else 0


def _add_logprobs(message: vllm.OutputLogProbs, entries: list[TokenLogprobs]) -> None:
    for position in entries:
        message.token_logprobs.append(position.logprobs[0])
        message.token_ids.append(position.token_ids[0])
        message.top_logprobs.add(values=position.logprobs[1:], token_ids=position.token_ids[1:])


def _end(
    message: vllm.GenerateComplete, state: RequestState, delta: OutputDelta, status: SequenceStatus
) -> vllm.GenerateComplete:
    """Fill in the finish reason and the counts of tokens of an ended output."""
    message.finish_reason = REASONS[status]
    message.prompt_tokens = state.request.num_prompt_tokens
    message.completion_tokens = delta.num_output_tokens
    message.cached_tokens = state.num_cached_tokens
    message.index = delta.index
    if isinstance(delta.stop, str):
        message.matched_stop_str = delta.stop
    elif delta.stop is not None:
        message.matched_token_id = delta.stop
    return message
