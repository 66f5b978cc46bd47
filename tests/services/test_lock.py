"""What a caller without the right key can do: nothing but ask for health."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from cluster import OWN
from engines import running, until
from fake_worker_service import TOKEN, FakeWorkerService, serving
from locked import KEYRING, KEYS, LONG, OPEN, code_of, codes, locked_scheduler, refused
from scheduler_in_process import InProcess, scheduler
from test_processes import WORKER_SIZES, Start, start  # noqa: F401  # a fixture

from pagewire.v1.inference_service_pb2 import AbortRequest, GenerateRequest
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client import Client, SamplingParams
from pagewire_client.channel import key_metadata
from pagewire_client.llm import collect
from scheduler_service.access.keys import ApiKey, Keyring, digest_of
from scheduler_service.core import SamplingParams as CoreParams
from scheduler_service.core import SequenceGroup
from scheduler_service.engine.calls.admission import Admission
from scheduler_service.engine.calls.calls import Call, Outbox
from scheduler_service.frontend.server import front_end_server
from scheduler_service.settings import SchedulerSettings


@pytest.fixture
async def locked(byte_tokenizer_directory: Path) -> AsyncIterator[InProcess]:
    async with locked_scheduler(byte_tokenizer_directory, KEYRING) as one:
        yield one


@pytest.mark.parametrize("key", ["", "a wrong key", KEYS["gold"].upper()])
async def test_without_a_key_every_method_is_closed_but_health(locked: InProcess, key: str) -> None:
    for target in (locked.target, locked.admin_target):
        found = await codes(target, key)
        closed = {method: code for method, code in found.items() if not method.startswith(OPEN)}
        assert set(closed.values()) == {grpc.StatusCode.UNAUTHENTICATED}
        assert {found[f"{OPEN}{method}"] for method in ("Check", "Watch")} == {grpc.StatusCode.OK}


@pytest.mark.parametrize(("key", "may_administer"), [(KEYS["gold"], False), (KEYS["admin"], True)])
async def test_a_key_opens_what_it_is_for(locked: InProcess, key: str, may_administer: bool) -> None:
    closed = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
    assert not closed & set((await codes(locked.target, key)).values())
    found = await codes(locked.admin_target, key)
    of_operators = {code for method, code in found.items() if not method.startswith(OPEN)}
    if may_administer:
        assert not closed & of_operators
    else:
        assert of_operators == {grpc.StatusCode.PERMISSION_DENIED}


async def test_a_request_is_its_keys_tenants_alone(locked: InProcess) -> None:
    gold, iron = key_metadata(KEYS["gold"]), key_metadata(KEYS["iron"])
    request = GenerateRequest(request_id="same", text="a prompt", sampling=LONG)
    async with grpc.aio.insecure_channel(locked.target) as channel:
        stub = InferenceServiceStub(channel)
        mine = aiter(stub.Generate(request, metadata=gold))
        await anext(mine)
        # The other tenant can neither end it, nor go on with it, nor ask in its name; and may use the same id.
        assert not (await stub.Abort(AbortRequest(request_id="same"), metadata=iron)).aborted
        for message in (GenerateRequest(text="x", tenant="gold"), AbortRequest(request_id="same", tenant="gold")):
            method: Callable[..., Any] = stub.Generate if isinstance(message, GenerateRequest) else stub.Abort
            error = await refused(method(message, metadata=iron))
            assert error.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "gold" not in str(error.details())
        again = GenerateRequest(request_id="same", text="a prompt", sampling=LONG)
        again.resume.SetInParent()
        assert [message async for message in stub.Generate(again, metadata=iron)][-1].finish_reason
        assert [message async for message in mine][-1].finish_reason
        assert (await stub.Abort(AbortRequest(request_id="gone", tenant="gold"), metadata=gold)).aborted is False


async def test_a_tenants_cached_prompts_are_its_own(locked: InProcess) -> None:
    prompt = "a prompt that is longer than some blocks"
    cached = []
    for name in ("gold", "gold", "iron", "iron"):
        async with Client(locked.target, api_key=KEYS[name]) as client:
            completion = await collect(client, prompt, SamplingParams(max_tokens=2))
            cached.append(completion.cached_tokens > 0)
    assert cached == [False, True, False, True]


async def test_a_key_is_held_to_its_limits_and_to_its_models(locked: InProcess) -> None:
    async with grpc.aio.insecure_channel(locked.target) as channel:
        stub, gold = InferenceServiceStub(channel), key_metadata(KEYS["gold"])
        held = [aiter(stub.Generate(GenerateRequest(text="a", sampling=LONG), metadata=gold)) for _ in range(2)]
        for call in held:
            await anext(call)
        error = await refused(stub.Generate(GenerateRequest(text="a"), metadata=gold))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 requests in flight" in str(error.details())
        for call in held:
            assert [message async for message in call][-1].finish_reason
        assert (await anext(aiter(stub.Generate(GenerateRequest(text="a"), metadata=gold)))).request_id
        none = key_metadata("key of no model")
        for refused_call in (stub.Generate(GenerateRequest(text="a"), metadata=none), *side_calls(stub, none)):
            assert (await refused(refused_call)).code() is grpc.StatusCode.PERMISSION_DENIED


def side_calls(stub: InferenceServiceStub, metadata: Any) -> list[Any]:
    from pagewire.v1.inference_service_pb2 import DetokenizeRequest, GetModelRequest, TokenizeRequest

    return [
        stub.GetModel(GetModelRequest(), metadata=metadata),
        stub.Tokenize(TokenizeRequest(text="a"), metadata=metadata),
        stub.Detokenize(DetokenizeRequest(token_ids=[5]), metadata=metadata),
    ]


async def test_keys_are_read_again_and_those_that_are_gone_open_nothing(locked: InProcess) -> None:
    locked.engine.front_ends.set_keys(Keyring([ApiKey(id="new", digest=digest_of("new"), tenant="gold", weight=3)]))
    async with Client(locked.target, api_key="new", retry_for=0) as client:
        while True:
            try:
                await client.get_model()
                break
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED  # noqa: PT017  # the front end has yet to hear
    async with Client(locked.target, api_key=KEYS["gold"], retry_for=0) as client:
        assert (await refused(client.get_model())).code() is grpc.StatusCode.UNAUTHENTICATED
    assert locked.engine._weights == {"gold": 3}


def messages(logs: Sequence[Any], event: str) -> list[Any]:
    return [log for log in logs if log["event"] == event]


async def test_a_request_leaves_one_line_that_says_nothing_of_its_content(locked: InProcess) -> None:
    import structlog

    with structlog.testing.capture_logs() as logs:
        async with Client(locked.target, api_key=KEYS["iron"], retry_for=0) as client:
            await collect(client, "a secret prompt", SamplingParams(max_tokens=3, ignore_eos=True))
            await refused(collect(client, "another secret", SamplingParams(temperature=-1)))
        await until(lambda: len(messages(logs, "request closed")) == 2)
    whole, refusal = messages(logs, "request closed")
    assert (whole["status"], whole["tenant"], whole["api_key"]) == ("OK", "iron", "iron-1")
    assert (whole["prompt_tokens"], whole["output_tokens"], whole["finish_reasons"]) == (15, [3], ["length"])
    assert (refusal["status"], refusal["tenant"], refusal["api_key"]) == ("INVALID_ARGUMENT", "iron", "iron-1")
    assert refusal["total_seconds"] >= 0
    assert "secret" not in json.dumps(logs, default=str)


async def test_a_front_end_has_a_number_of_connections(byte_tokenizer_directory: Path) -> None:
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address) as one:
        server = front_end_server(one.link, shares_port=False, max_connections=2)
        target = await server.start("127.0.0.1:0")
        channels = [grpc.aio.insecure_channel(target, options=OWN) for _ in range(3)]
        found = [await code_of(channel, f"{OPEN}Check", None) for channel in channels]
        assert found == [grpc.StatusCode.OK, grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE]
        for channel in channels:
            await channel.close()
        await server.server.stop(None)


async def test_prompts_that_are_said_to_be_resumed_are_counted(locked: InProcess) -> None:
    limited = ApiKey(id="gold-1", digest=digest_of(KEYS["gold"]), tenant="gold", tokens_per_minute=1000)
    locked.engine.set_keys(Keyring([limited]))
    async with grpc.aio.insecure_channel(locked.target) as channel:
        stub, codes = InferenceServiceStub(channel), []
        for number in range(8):
            sampling = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
            request = GenerateRequest(request_id=str(number), text="a" * 40, sampling=sampling)
            request.resume.outputs.add(index=0, token_ids=[5])
            call = stub.Generate(request, metadata=key_metadata(KEYS["gold"]))
            assert [message async for message in call]
            codes.append(await call.code())
        used = locked.engine.requests.admission.quotas._uses["gold-1"].tokens
        assert set(codes) == {grpc.StatusCode.OK}
        assert used._used > 8 * 40


@pytest.mark.parametrize(
    ("token_ids", "changes", "expected"),
    [
        ([], {}, 0),
        ([TOKEN] * 3, {}, 0),
        ([TOKEN, TOKEN, 5, 5], {}, 2),
        ([5] * 200, {}, 200),
        ([TOKEN] * 3, {"cache_salt": "another"}, 43),
        ([TOKEN] * 3, {"key": "gold again"}, 43),
    ],
)
async def test_a_resumption_of_a_request_in_flight_is_charged_for_what_was_not_streamed_to_its_key(
    byte_tokenizer_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    token_ids: list[int],
    changes: dict[str, str],
    expected: int,
) -> None:
    both = [
        ApiKey(id=name, digest=digest_of(name), tenant="gold", tokens_per_minute=1000)
        for name in ("gold", "gold again")
    ]
    worker, charged = FakeWorkerService(byte_tokenizer_directory), []
    async with serving(worker) as address, scheduler(address, keyring=Keyring(both)) as one:
        requests = one.engine.requests.in_flight
        monkeypatch.setattr(
            one.engine.requests.admission.quotas, "use_tokens", lambda _, number: charged.append(number)
        )
        async with grpc.aio.insecure_channel(one.target) as channel:
            stub, sampling = InferenceServiceStub(channel), SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
            request = GenerateRequest(request_id="same", text="a" * 40, sampling=sampling)
            async for _ in stub.Generate(request, metadata=key_metadata("gold")):
                worker.runs.clear()
                (broken,) = requests.values()
                if broken.group.num_output_tokens >= 3:
                    break
                worker.runs.set()
            assert charged == [40]
            request.resume.outputs.add(index=0, token_ids=token_ids)
            request.cache_salt = changes.get("cache_salt", "")
            again = stub.Generate(request, metadata=key_metadata(changes.get("key", "gold")))
            await until(lambda: [*requests.values()] not in ([], [broken]))
            assert charged[1] == expected
            again.cancel()


def test_a_request_that_is_superseded_before_it_gains_anything_is_charged_anew() -> None:
    """Otherwise it would be computed again and again for nothing."""
    limited = ApiKey(id="a", digest=digest_of("a"), tenant="", tokens_per_minute=1000)
    charged, calls = [], [Call(Outbox(), number, "same", "a") for number in range(4)]
    admission = Admission(SchedulerSettings(), {}, Keyring([limited]))
    admission.quotas.use_tokens = lambda _, number: charged.append(number)  # type: ignore[method-assign]
    before = None
    for call in calls:
        call.group = SequenceGroup("same", [5] * 40, CoreParams(max_tokens=400))
        admission.admit(call, 0, resumes=before is not None)
        admission.submitted(call, before)
        before = call
        call.queued_seconds = None if call is calls[0] else 0.1  # the first has not come to a worker
        if call is calls[2]:
            call.group.sequences[0].output_token_ids.append(5)
    assert charged == [40, 0, 40, 0]
