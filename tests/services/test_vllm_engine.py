"""vLLM's engine protocol gives the same outputs as our own, whole and streamed, and ends in the same ways."""

import asyncio
import io
import zipfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cluster import until_idle
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client, LocalServer, SamplingParams
from pagewire_client.llm import Completion, collect
from scheduler_service.frontend.output.streams import OutputDelta
from scheduler_service.frontend.vllm_engine_codec import StreamedAnswers

PROMPT = [72, 101, 108, 108, 111]

OURS_AND_THEIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.0}, {"temperature": 0.0}),
    ({"seed": 5, "temperature": 1.0}, {"seed": 5}),
    (
        {"seed": 2**64 - 7, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"seed": -7, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    ),
    ({"n": 3, "seed": 1, "temperature": 1.0, "logprobs": 2}, {"n": 3, "seed": 1, "logprobs": 2}),
    (
        {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.4},
        {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.4},
    ),
    ({"temperature": 0.0, "logit_bias": {80: 100.0}}, {"temperature": 0.0, "logit_bias": {80: 100.0}}),
    ({"temperature": 0.0, "logprobs": 0}, {"temperature": 0.0, "logprobs": 0}),
    (
        {"seed": 3, "temperature": 1.0, "stop_token_ids": list(range(90, 120)), "min_tokens": 4},
        {"seed": 3, "temperature": 1.0, "stop_token_ids": list(range(90, 120)), "min_tokens": 4},
    ),
    *(
        ({"seed": 9, "temperature": 1.0, "ignore_eos": False} | ours, {"seed": 9, "ignore_eos": False} | params)
        for ours, params in (
            ({"json_schema": '{"type": "boolean"}'}, {"json_schema": '{"type": "boolean"}'}),
            ({"json_schema": '{"type": "object"}'}, {"json_object": True}),
            ({"regex": "a{3}b"}, {"regex": "a{3}b"}),
            ({"grammar": 'start: "x" | "yy"'}, {"grammar": 'start: "x" | "yy"'}),
            ({"choice": {"options": ["one", "two"]}}, {"choice": {"choices": ["one", "two"]}}),
        )
    ),
    (
        {"seed": 4, "temperature": 1.0, "stop": ["a", "b", "c"], "logit_bias": {67: 5.0, 68: 5.0, 69: 5.0}},
        {"seed": 4, "temperature": 1.0, "stop": ["a", "b", "c"], "logit_bias": {67: 5.0, 68: 5.0, 69: 5.0}},
    ),
]


@dataclass
class Answer:
    """One output, from all of its messages."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, float, list[int]]] = field(default_factory=list)
    end: vllm_engine_pb2.GenerateComplete | None = None


def theirs(stream: bool, token_ids: list[int] = PROMPT, **params: Any) -> vllm_engine_pb2.GenerateRequest:
    params = {"max_tokens": 24, "ignore_eos": True, "skip_special_tokens": True} | params
    return vllm_engine_pb2.GenerateRequest(
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=token_ids),
        sampling_params=vllm_engine_pb2.SamplingParams(**params),
        stream=stream,
    )


async def answers(stub: Any, request: vllm_engine_pb2.GenerateRequest) -> dict[int, Answer]:
    """What each output had, whether it came in chunks or whole."""
    found: dict[int, Answer] = {}
    async for response in stub.Generate(request):
        kind = response.WhichOneof("response")
        assert kind == "complete" or request.stream
        assert kind == "complete" or len(response.chunk.token_ids) == 1
        message = getattr(response, kind)
        answer = found.setdefault(message.index, Answer())
        assert answer.end is None
        answer.token_ids += message.token_ids if kind == "chunk" else message.output_ids
        log = message.output_logprobs
        answer.logprobs += [
            (token_id, logprob, list(top.token_ids))
            for token_id, logprob, top in zip(log.token_ids, log.token_logprobs, log.top_logprobs, strict=True)
        ]
        assert message.completion_tokens == len(answer.token_ids)
        if kind == "complete":
            answer.end = message
    return found


def expected(completion: Completion) -> dict[int, Answer]:
    """The same of our own protocol, without the ends."""
    return {
        index: Answer(
            output.token_ids,
            [(one.chosen.token_id, one.chosen.logprob, [top.token_id for top in one.top]) for one in output.logprobs],
        )
        for index, output in enumerate(completion.outputs)
    }


def test_a_chunk_has_one_token_also_where_a_client_is_told_of_several_at_once() -> None:
    """Otherwise a gateway that reads thoughts loses what comes behind them in a chunk."""
    state: Any = SimpleNamespace(request=SimpleNamespace(num_prompt_tokens=5), num_cached_tokens=0)
    delta = OutputDelta(index=1, token_ids=[7, 8, 9], num_output_tokens=10)
    chunks = [message.chunk for message in StreamedAnswers(state).encode(delta)]
    assert [(list(chunk.token_ids), chunk.completion_tokens) for chunk in chunks] == [([7], 8), ([8], 9), ([9], 10)]


@pytest.fixture
async def stub(tiny_server: LocalServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(tiny_server.target) as channel:
        yield VllmEngineStub(channel)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(("ours", "params"), OURS_AND_THEIRS)
async def test_outputs_are_those_of_our_own_protocol(
    tiny_server: LocalServer, stub: Any, ours: dict[str, Any], params: dict[str, Any], stream: bool
) -> None:
    async with Client(tiny_server.target) as client:
        completion = await collect(client, PROMPT, SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | ours))
    found = await answers(stub, theirs(stream, **params))
    for index, output in enumerate(completion.outputs):
        end, found[index].end = found[index].end, None
        assert end is not None
        assert (
            end.finish_reason
            == {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}[output.finish_reason]
        )
        assert end.prompt_tokens == len(PROMPT)
        matched = end.WhichOneof("matched_stop")
        assert (getattr(end, matched) if matched else None) == output.stop_reason
    assert found == expected(completion)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_what_is_not_allowed_is_refused_with_the_status_of_our_own_protocol(stub: Any, stream: bool) -> None:
    refused = {
        "temperature": theirs(stream, temperature=float("nan")),
        "token_ids is empty": theirs(stream, []),
        "prompt is missing": vllm_engine_pb2.GenerateRequest(stream=stream),
        "sampling.n": theirs(stream, n=1000),
        "sampling_params.logprobs is -1": theirs(stream, logprobs=-1),
        "has the token -1": theirs(stream, logit_bias={-1: 1.0}),
        "truncate_prompt_tokens": theirs(stream, truncate_prompt_tokens=3),
        "prompt_logprobs is not supported": theirs(stream, prompt_logprobs=1),
        "structural_tag": theirs(stream, structural_tag="x"),
        "the context": theirs(stream, [72] * 600),
    }
    media = theirs(stream)
    media.mm_inputs.SetInParent()
    for words, request in (refused | {"mm_inputs": media}).items():
        with pytest.raises(grpc.aio.AioRpcError, match=words) as error:
            await answers(stub, request)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_abort_and_a_client_that_leaves_free_everything(
    tiny_server: LocalServer, stub: Any, stream: bool
) -> None:
    request = theirs(stream, max_tokens=500)
    request.request_id = "one"
    aborted = asyncio.create_task(answers(stub, request))
    left = stub.Generate(theirs(stream, max_tokens=500))
    reading = asyncio.create_task(left.read())
    await asyncio.sleep(0)
    while not aborted.done():
        await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["no such request", "one"]))
    (answer,) = (await aborted).values()
    assert answer.end is not None
    assert answer.end.finish_reason == "abort"
    left.cancel()
    await asyncio.wait([reading])
    (worker,) = (await until_idle(tiny_server.admin_target)).workers
    assert worker.num_free_device_blocks == worker.num_device_blocks


async def test_a_gateway_is_told_of_the_model(stub: Any, tiny_model_directory: Path) -> None:
    info = await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
    assert (info.served_model_name, info.max_context_length, info.vocab_size) == ("tiny-llama", 512, 259)
    assert (info.model_type, list(info.architectures), list(info.eos_token_ids)) == ("llama", ["LlamaForCausalLM"], [2])
    assert '"temperature": 0.0' in info.default_sampling_params_json
    server = await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
    assert (server.server_type, server.model_dtype, server.block_size) == ("vllm-grpc", "torch.float32", 8)
    assert (await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())).healthy
    chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    with zipfile.ZipFile(io.BytesIO(b"".join(chunk.data for chunk in chunks))) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            assert archive.read(name) == (tiny_model_directory / name).read_bytes()


async def test_other_methods_say_that_they_are_not_implemented(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.StartProfile(common_pb2.StartProfileRequest())
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_vector_is_that_of_our_own_protocol(stub: Any, tiny_server: LocalServer) -> None:
    async with Client(tiny_server.target) as client:
        (expected,) = await client.embed([PROMPT])
    tokenized = vllm_engine_pb2.TokenizedInput(input_ids=PROMPT)
    found = await stub.Embed(vllm_engine_pb2.EmbedRequest(tokenized=tokenized))
    assert list(found.embedding) == list(expected.vector)
    assert (found.prompt_tokens, found.embedding_dim) == (5, 64)
    with pytest.raises(grpc.aio.AioRpcError, match="is empty") as error:
        await stub.Embed(vllm_engine_pb2.EmbedRequest())
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
