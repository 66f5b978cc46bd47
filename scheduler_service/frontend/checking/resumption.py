"""Checks the output that a client has received from a broken stream, and adds it to the request."""

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

import grpc

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_common.calls.errors import RequestError
from scheduler_service.frontend.checking.checks import check_token_ids, invalid, take_token_ids
from scheduler_service.frontend.model import ServedModel
from scheduler_service.frontend.output.request import GenerationRequest, Resumption, served_fingerprint
from scheduler_service.frontend.text.output_text import OutputText


async def check_resumption(
    message: pb.GenerateRequest, request: GenerationRequest, model: ServedModel
) -> GenerationRequest:
    resume = message.resume
    served = served_fingerprint(model, request.adapter_id)
    if resume.model_fingerprint not in ("", served):
        raise RequestError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"resume.model_fingerprint is {resume.model_fingerprint[:64]!r}; this server serves another model, "
            f"{served!r}",
        )
    places = _check_indices(resume.outputs, request.num_outputs)
    finished = frozenset(output.index for output in resume.outputs if output.finished)
    token_ids: dict[int, array[int]] = {}
    for output in resume.outputs:
        if output.token_ids and not output.finished:
            field = f"{places[output.index]}.token_ids"
            _check_number(field, len(output.token_ids), request)
            token_ids[output.index] = await take_token_ids(output.token_ids)
            await asyncio.to_thread(_check_tokens, field, token_ids[output.index], request, model)
    has_begun = 0 in finished or 0 in token_ids
    begun, forced = (token_ids, {}) if request.comes_whole else ({}, token_ids)
    _check_prompt_logprobs(resume.num_prompt_logprobs, request)
    return replace(
        request,
        sampling=replace(
            request.sampling,
            seed=_seed(message, request, is_needed=bool(token_ids)),
            prompt_logprobs=None if has_begun else request.sampling.prompt_logprobs,  # sent before any token
        ),
        resumes=True,
        resumption=Resumption(
            token_ids=tuple(forced.get(index, ()) for index in range(request.num_outputs)) if forced else (),
            begun=begun,
            texts=await asyncio.to_thread(_replay, forced, places, request, model),
            finished=finished,
            num_prompt_logprobs=resume.num_prompt_logprobs,
        ),
    )


def _check_indices(outputs: Sequence[pb.ResumedOutput], num_outputs: int) -> dict[int, str]:
    """The name of each resumed output in error messages, by the output's index."""
    if len(outputs) > num_outputs:
        invalid(f"resume.outputs has {len(outputs)} entries; at most {num_outputs} (sampling.n) are allowed")
    places: dict[int, str] = {}
    for position, output in enumerate(outputs):
        place = f"resume.outputs[{position}]"
        if output.index >= num_outputs:
            invalid(f"{place}.index is {output.index}; it must be below sampling.n ({num_outputs})")
        if output.index in places:
            invalid(f"{place}.index is {output.index}, as in {places[output.index]}")
        places[output.index] = place
    return places


def _check_number(field: str, num_tokens: int, request: GenerationRequest) -> None:
    most = request.sampling.max_tokens
    if num_tokens >= most:
        invalid(f"{field} has {num_tokens} entries; an unfinished output has fewer than {most}")


def _check_tokens(field: str, token_ids: Sequence[int], request: GenerationRequest, model: ServedModel) -> None:
    """Refuse an output with an end token, because nothing is left to generate."""
    sampling = request.sampling
    check_token_ids(field, token_ids, model)
    for position in range(sampling.min_tokens, len(token_ids)):
        if token_ids[position] in sampling.end_token_ids:
            invalid(f"{field}[{position}] is {token_ids[position]}, which ends an output; it must be marked finished")


def _check_prompt_logprobs(count: int, request: GenerationRequest) -> None:
    asked = request.sampling.prompt_logprobs is not None
    most = len(request.prompt_token_ids) - 1 if asked else 0
    if count > most:
        invalid(f"resume.num_prompt_logprobs is {count}; this request has {most} at most")


def _seed(message: pb.GenerateRequest, request: GenerationRequest, *, is_needed: bool) -> int:
    resume, sampling = message.resume, message.sampling
    if not resume.HasField("seed"):
        if is_needed and not sampling.HasField("seed"):
            invalid("resume.seed is missing: take it from the first message of the broken stream")
        return request.sampling.seed
    if sampling.HasField("seed") and sampling.seed != resume.seed:
        invalid(f"resume.seed is {resume.seed} and sampling.seed {sampling.seed}; they must be the same")
    return resume.seed


def _replay(
    token_ids: Mapping[int, Sequence[int]], places: Mapping[int, str], request: GenerationRequest, model: ServedModel
) -> dict[int, OutputText]:
    """Decode the received tokens again, on a thread: 2 µs a token."""
    texts: dict[int, OutputText] = {}
    for index, tokens in token_ids.items():
        texts[index] = request.text(model.tokenizer)
        stop = texts[index].replay(tokens)
        if stop is not None:
            invalid(f"{places[index]}.token_ids contain the stop string {stop!r}; the output must be marked finished")
    return texts
