"""Every call leaves a line in the log, which has the key that made it and nothing of what was asked."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from engines import until
from fake_worker_service import FakeWorkerService, serving
from http_edge import http_edge
from locked import KEYRING, KEYS, OPEN, code_of, codes, refused
from scheduler_in_process import InProcess, scheduler
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from pagewire.v1 import admin_service_pb2 as admin_pb
from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.admin_service_pb2_grpc import AdminServiceStub
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client.channel import key_metadata
from scheduler_service.access import audit

SECRET = "a secret that no line may tell"
OWN_LINES = {"Generate", "Embed", "Score", "Transcribe"}


@pytest.fixture
async def locked(byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[InProcess]:
    monkeypatch.setattr(audit, "MAX_REFUSED", 1000)
    async with (
        serving(FakeWorkerService(byte_tokenizer_directory)) as address,
        scheduler(address, keyring=KEYRING) as one,
    ):
        await one.engine.model()
        yield one


def closed(logs: Sequence[Any]) -> list[Any]:
    return [log for log in logs if log["event"].endswith("closed")]


async def test_every_method_that_reflection_lists_leaves_a_line_with_the_key_that_called_it(locked: InProcess) -> None:
    for target in (locked.target, locked.admin_target):
        with capture_logs() as logs:
            found = await codes(target, KEYS["admin"])
            expected = {method for method in found if not method.startswith(OPEN)}
            own = {method for method in expected if method.rpartition("/")[2] in OWN_LINES and found[method]}
            # The call that listed the methods has one as well.
            most = len(expected)
            await until(lambda found=logs, most=most: len(closed(found)) > most)
        lines = [log for log in logs if log["event"] == "call closed"]
        assert {line["method"] for line in lines} == expected - own
        assert len(closed(logs)) - len(lines) == len(own)
        assert {line["api_key"] for line in closed(logs)} == {"admin-1"}
        for line in lines:
            code = found[line["method"]]
            assert line["status"] == code.name or (code is grpc.StatusCode.OK and line["status"] == "CANCELLED")
            assert line["peer"].startswith("ipv4:127.0.0.1:")


async def test_a_refused_key_leaves_a_line_for_every_method_without_the_key(locked: InProcess) -> None:
    for target in (locked.target, locked.admin_target):
        with capture_logs() as logs:
            found = await codes(target, SECRET)
            expected = {method for method in found if not method.startswith(OPEN)}
            await until(lambda found=logs, all_of=expected: {log["method"] for log in refusals(found)} == all_of)
        assert not {"tenant", "api_key"} & {name for log in refusals(logs) for name in log}
        assert SECRET not in json.dumps(logs, default=str)


def refusals(logs: Sequence[Any]) -> list[Any]:
    return [log for log in logs if log["event"] == "call closed" and log["status"] == "UNAUTHENTICATED"]


async def test_what_an_operator_does_has_the_key_and_the_worker_that_it_was_done_to(locked: InProcess) -> None:
    with capture_logs() as logs:
        async with grpc.aio.insecure_channel(locked.admin_target) as channel:
            stub, admin = AdminServiceStub(channel), key_metadata(KEYS["admin"])
            (worker,) = locked.engine.workers.all
            await stub.DrainWorker(admin_pb.DrainWorkerRequest(address=worker.client.address), metadata=admin)
            await refused(stub.LoadAdapter(admin_pb.LoadAdapterRequest(name="poet"), metadata=admin))
            await refused(stub.ListAdapters(admin_pb.ListAdaptersRequest(), metadata=key_metadata(KEYS["gold"])))
        await until(lambda: len(closed(logs)) == 3)
    names = ("method", "status", "api_key", "worker", "lora_name")
    service = "/pagewire.v1.AdminService/"
    assert [tuple(line.get(name) for name in names) for line in closed(logs)] == [
        (f"{service}DrainWorker", "OK", "admin-1", worker.client.address, None),
        (f"{service}LoadAdapter", "FAILED_PRECONDITION", "admin-1", None, "poet"),
        (f"{service}ListAdapters", "PERMISSION_DENIED", "gold-1", None, None),
    ]


async def test_calls_beside_generate_leave_a_line_that_says_nothing_of_their_content(locked: InProcess) -> None:
    gold = key_metadata(KEYS["gold"])
    with capture_logs() as logs:
        async with grpc.aio.insecure_channel(locked.target) as channel:
            stub = InferenceServiceStub(channel)
            await stub.Tokenize(pb.TokenizeRequest(text=SECRET), metadata=gold)
            await stub.Detokenize(pb.DetokenizeRequest(token_ids=[5]), metadata=gold)
            await stub.Abort(pb.AbortRequest(request_id="mine"), metadata=gold)
            await stub.GetModel(pb.GetModelRequest(), metadata=gold)
        await until(lambda: len(closed(logs)) == 4)
    lines = closed(logs)
    assert [line["method"].rpartition("/")[2] for line in lines] == ["Tokenize", "Detokenize", "Abort", "GetModel"]
    assert {(line["status"], line["tenant"], line["api_key"]) for line in lines} == {("OK", "gold", "gold-1")}
    assert [line["request_id"] for line in lines if "request_id" in line] == ["mine"]
    assert SECRET not in json.dumps(logs, default=str)


async def test_a_request_that_is_refused_before_it_is_read_leaves_a_line(locked: InProcess) -> None:
    async with grpc.aio.insecure_channel(locked.target) as channel:
        with capture_logs() as logs:
            method = "/pagewire.v1.InferenceService/Generate"
            send: Any = channel.unary_stream(method)
            await refused(send(b"\xff", metadata=key_metadata(KEYS["gold"])))
            await until(lambda: closed(logs))
    (line,) = closed(logs)
    assert (line["method"], line["status"], line["api_key"]) == (method, "INVALID_ARGUMENT", "gold-1")


async def test_a_request_over_http_leaves_one_line_with_its_route_its_status_and_why(locked: InProcess) -> None:
    """The client's own name of the request is in the line and in the answer."""
    chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}
    asked: list[tuple[str, dict[str, Any], str, int, str]] = [
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 2}, "iron", 200, ""),
        ("/v1/chat/completions", chat, "iron", 200, ""),
        ("/v1/chat/completions", chat | {"model": "x"}, "iron", 404, "there is no model 'x'; this server has fake"),
        ("/v1/chat/completions", chat | {"temperature": -1}, "iron", 400, "temperature is -1"),
        ("/v1/embeddings", {"input": 3}, "iron", 400, "input does not have the form"),
        ("/v1/chat/completions", chat, "none", 401, "API key"),
        ("/x", {}, "iron", 404, "POST /x is not served here"),
    ]
    async with http_edge(locked.link) as url, aiohttp.ClientSession() as session:
        for number, (path, body, key, status, reason) in enumerate(asked):
            headers = {"Authorization": f"Bearer {KEYS.get(key, key)}", "X-Request-Id": f"mine-{number}"}
            with capture_logs([merge_contextvars]) as logs:
                posted = session.post(url + path, json=body, headers=headers)
                async with posted as answer:
                    assert (answer.status, answer.headers["X-Request-Id"]) == (status, f"mine-{number}")
                await until(lambda found=logs: closed(found))
            (line,) = closed(logs)
            assert (line["route"], line["client_request_id"]) == (f"POST {path}", f"mine-{number}")
            names = {200: "OK", 400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 404: "NOT_FOUND"}
            assert (line["status"], line["http_status"]) == (names[status], status)
            assert reason in line.get("reason", ""), line
            assert SECRET not in json.dumps(logs, default=str)


async def test_a_flood_of_wrong_keys_is_a_few_lines_and_a_number(
    locked: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "MAX_REFUSED", 3)
    monkeypatch.setattr(audit, "PERIOD_SECONDS", 0.5)
    with capture_logs() as logs:
        async with grpc.aio.insecure_channel(locked.target) as channel:
            for _ in range(20):
                await code_of(channel, "/pagewire.v1.InferenceService/GetModel", key_metadata("wrong"))
        await until(lambda: len(refusals(logs)) + sum(log.get("not_logged", 0) for log in logs) == 20)
    counted = [log for log in logs if log["event"] == "more calls without a valid key"]
    assert len(refusals(logs)) <= 3 * (len(counted) + 1)
    assert counted


async def test_a_call_that_is_gone_is_not_asked_for_its_peer() -> None:
    """gRPC ends the process then, and a stream may be ended after its call, as when its client has left."""

    class FakeContext:
        is_gone = False

        def peer(self) -> str:
            assert not self.is_gone
            return "ipv4:127.0.0.1:1"

        def code(self) -> None:
            return None

    context: Any = FakeContext()
    with capture_logs() as logs:
        async with audit.Audit()._watched("/a/b", context):
            context.is_gone = True
    assert [log["peer"] for log in closed(logs)] == ["ipv4:127.0.0.1:1"]
