"""What a key can do with another tenant's requests, and with models, adapters and a share that are not its own."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from engines import until
from fake_worker_service import FakeWorkerService, serving
from locked import LONG, locked_scheduler, refused
from scheduler_in_process import InProcess, scheduler

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client import Client, SamplingParams
from pagewire_client.channel import key_metadata
from pagewire_client.llm import collect
from scheduler_service.access.key_file import KeyFile
from scheduler_service.access.keys import ApiKey, Keyring, digest_of

Code = grpc.StatusCode
KEYRING = Keyring(
    [
        ApiKey(id="gold", digest=digest_of("gold"), tenant="gold"),
        ApiKey(id="iron", digest=digest_of("iron"), tenant="iron"),
        ApiKey(id="no-model", digest=digest_of("no model"), tenant="iron", models=frozenset({"another"})),
        ApiKey(id="no-adapter", digest=digest_of("no adapter"), tenant="iron", adapters=frozenset({"mine"})),
    ]
)
GOLD, IRON = key_metadata("gold"), key_metadata("iron")
SOUND = pb.Sound(data=b"RIFF", content_type="audio/wav")
ASKED: dict[str, Any] = {
    "Generate": pb.GenerateRequest(text="a", sampling=SamplingParams(max_tokens=1)),
    "Abort": pb.AbortRequest(request_id="x"),
    "GetModel": pb.GetModelRequest(),
    "Tokenize": pb.TokenizeRequest(text="a"),
    "Detokenize": pb.DetokenizeRequest(token_ids=[5]),
    "Embed": pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")]),
    "Score": pb.ScoreRequest(query="a", documents=["b"]),
    "Transcribe": pb.TranscribeRequest(sound=SOUND),
}
"""A call of each method of InferenceService."""


def methods_with(field: str) -> list[str]:
    service = pb.DESCRIPTOR.services_by_name["InferenceService"]
    return [method.name for method in service.methods if field in method.input_type.fields_by_name]


@pytest.fixture
async def locked(byte_tokenizer_directory: Path) -> AsyncIterator[InProcess]:
    async with locked_scheduler(byte_tokenizer_directory, KEYRING) as one:
        yield one


@pytest.fixture
async def channel(locked: InProcess) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(locked.target) as channel:
        yield channel


async def status(call: Any) -> grpc.StatusCode:
    """What a call ends with, whichever kind it is."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        await call.code()
    except grpc.aio.AioRpcError as error:
        return error.code()
    code: grpc.StatusCode = await call.code()
    return code


def test_every_method_is_among_those_that_are_asked_for_here() -> None:
    assert ASKED.keys() == {method.name for method in pb.DESCRIPTOR.services_by_name["InferenceService"].methods}
    assert set(methods_with("tenant")) == {"Generate", "Abort", "Embed", "Score", "Transcribe"}


@pytest.mark.parametrize("method", methods_with("tenant"))
async def test_another_tenants_name_is_refused_by_every_method_that_takes_one(
    channel: grpc.aio.Channel, method: str
) -> None:
    asked = type(ASKED[method]).FromString(ASKED[method].SerializeToString())
    asked.tenant = "gold"
    call: Any = getattr(InferenceServiceStub(channel), method)
    error = await refused(call(asked, metadata=IRON))
    assert error.code() is Code.PERMISSION_DENIED
    assert "gold" not in str(error.details())
    assert await status(call(asked, metadata=GOLD)) is not Code.PERMISSION_DENIED


async def test_a_request_in_flight_is_out_of_another_tenants_reach_by_every_method_that_takes_its_id(
    channel: grpc.aio.Channel,
) -> None:
    """To the other tenant it is not there: its calls of that id are its own."""
    ours = InferenceServiceStub(channel)
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    reading = aiter(ours.Generate(pb.GenerateRequest(request_id="same", text="a", sampling=long), metadata=GOLD))
    await anext(reading)
    assert not (await ours.Abort(pb.AbortRequest(request_id="same"), metadata=IRON)).aborted
    again = pb.GenerateRequest(request_id="same", text="a", sampling=SamplingParams(max_tokens=2, seed=1))
    for resumes in (False, True):
        if resumes:
            again.resume.outputs.add(index=0, token_ids=[73])
        assert await status(ours.Generate(again, metadata=IRON)) is Code.OK
    assert [message async for message in reading][-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert not (await ours.Abort(pb.AbortRequest(request_id="same"), metadata=GOLD)).aborted  # it has ended by itself


async def test_a_tenants_own_requests_are_in_its_reach(locked: InProcess, channel: grpc.aio.Channel) -> None:
    ours = InferenceServiceStub(channel)
    call = ours.Generate(pb.GenerateRequest(request_id="same", text="a", sampling=LONG), metadata=GOLD)
    await anext(aiter(call))
    await ours.Abort(pb.AbortRequest(request_id="same", tenant="gold"), metadata=GOLD)
    assert [message async for message in call][-1].finish_reason == pb.FINISH_REASON_ABORT
    await until(lambda: not locked.engine.requests.in_flight)


@pytest.mark.parametrize("method", sorted(ASKED.keys() - {"Abort"}))
async def test_a_key_without_the_model_may_use_none_of_the_methods_that_need_it(
    channel: grpc.aio.Channel, method: str
) -> None:
    call: Any = getattr(InferenceServiceStub(channel), method)
    assert await status(call(ASKED[method], metadata=key_metadata("no model"))) is Code.PERMISSION_DENIED
    assert await status(call(ASKED[method], metadata=IRON)) is not Code.PERMISSION_DENIED


@pytest.mark.parametrize("method", methods_with("lora_name"))
async def test_a_key_may_name_its_own_adapters_alone_in_every_method_that_takes_one(
    channel: grpc.aio.Channel, method: str
) -> None:
    """Whether it is there is told to those alone that may name it."""
    call: Any = getattr(InferenceServiceStub(channel), method)
    asked = type(ASKED[method]).FromString(ASKED[method].SerializeToString())
    for name, expected in (("poet", Code.PERMISSION_DENIED), ("mine", Code.NOT_FOUND)):
        asked.lora_name = name
        assert await status(call(asked, metadata=key_metadata("no adapter"))) is expected
    assert await status(call(asked, metadata=IRON)) is Code.NOT_FOUND


def write_weights(file: Path, **weights: float) -> None:
    file.write_text(
        "".join(
            f'[[key]]\nid = "{name}"\ntenant = "{name}"\nweight = {weight}\n'
            f'sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            for name, weight in weights.items()
        )
    )


async def test_a_keys_weight_is_its_tenants_share_and_a_changed_file_changes_it(
    tmp_path: Path, byte_tokenizer_directory: Path
) -> None:
    """Both tenants ask for more than the worker can do at a time; it waits until all is asked for."""
    file = tmp_path / "keys.toml"
    write_weights(file, gold=3.0, iron=1.0)
    keys = KeyFile(file, None)
    worker = FakeWorkerService(byte_tokenizer_directory)
    worker.info.max_num_seqs = 2
    async with (
        serving(worker) as address,
        scheduler(address, scheduling_policy="fair", keyring=keys.keyring, prefix_caching="off") as one,
        Client(one.target, api_key="gold") as gold,
        Client(one.target, api_key="iron") as iron,
    ):
        await one.engine.model()

        async def share_of_gold() -> float:
            """Of the tokens that the first half of all requests got."""
            served: list[str] = []

            async def ask(client: Client, name: str) -> None:
                await collect(client, "a prompt", SamplingParams(max_tokens=4, ignore_eos=True))
                served.append(name)

            worker.runs.clear()
            asked = [asyncio.create_task(ask(*of)) for of in ((gold, "gold"), (iron, "iron")) * 40]
            await until(lambda: len(one.engine.requests.in_flight) == len(asked))
            worker.runs.set()
            await asyncio.gather(*asked)
            return Counter(served[: len(asked) // 2])["gold"] / (len(asked) // 2)

        assert await share_of_gold() == pytest.approx(0.75, abs=0.06)
        write_weights(file, gold=1.0, iron=1.0)
        watching = asyncio.create_task(keys.watch(one.engine.front_ends.set_keys))
        await until(lambda: one.engine._weights == {"gold": 1.0, "iron": 1.0})
        assert await share_of_gold() == pytest.approx(0.5, abs=0.06)
        watching.cancel()
        await asyncio.wait([watching])
