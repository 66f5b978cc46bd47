"""A proxy that the environment names: calls between services never use it, and clients' errors name it."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from collector import collector
from connect_proxy import PASSWORD, connect_proxy, set_proxy
from engines import running, submit, text_of
from fake_worker_service import FakeWorkerService, serving
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from pagewire_client import Client
from pagewire_common.connection.channel import proxy_of
from pagewire_common.healthcheck import is_serving
from pagewire_common.serving.server import GrpcServer
from pagewire_common.telemetry.tracing import tracing

CLOSED = "http://127.0.0.1:1"
ELSEWHERE = "0.0.0.0:1"
"""This machine, though not its loopback; it refuses at once."""


@pytest.fixture
async def server() -> AsyncIterator[GrpcServer]:
    served = GrpcServer([], max_receive_bytes=1 << 20)
    await served.set_serving(True)
    yield served
    await served.server.stop(None)


async def test_a_scheduler_reaches_its_workers_and_front_ends(
    byte_tokenizer_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_proxy(monkeypatch, http_proxy=CLOSED)
    worker = FakeWorkerService(byte_tokenizer_directory)
    async with serving(worker) as address, running(address, time_limit=20) as engine:
        assert await text_of(engine, await submit(engine, "a", [5])) == "ggggg"


async def test_health_checks_and_clients_on_this_machine_use_none(
    server: GrpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_proxy(monkeypatch, grpc_proxy=CLOSED)
    target = await server.start("127.0.0.1:0")
    await server.set_serving(True)
    assert await is_serving(target, "", None)
    assert await is_serving(target.replace("127.0.0.1", "0.0.0.0"), "", None)  # wherever it is
    async with Client(target) as client:
        await client.wait_until_serving(timeout=20)


async def test_spans_reach_a_collector_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    set_proxy(monkeypatch, https_proxy=CLOSED)
    with collector() as found:
        async with tracing(found.endpoint, "a-service") as tracer:
            assert tracer is not None
            tracer.start_span("work").end()
        assert [span.name for span in found.spans] == ["work"]


async def test_a_client_calls_a_server_elsewhere_through_the_proxy(
    server: GrpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = await server.start("0.0.0.0:0")
    await server.set_serving(True)
    async with connect_proxy(connects=True) as proxy:
        set_proxy(monkeypatch, http_proxy=f"http://{PASSWORD}@{proxy.address}")
        async with Client(target) as client:
            await client.wait_until_serving(timeout=20)
        assert proxy.asked == [target]


async def test_an_error_names_the_proxy_and_not_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connect_proxy(connects=False) as proxy:
        set_proxy(monkeypatch, https_proxy=f"http://{PASSWORD}@{proxy.address}")
        async with Client(ELSEWHERE, retry_for=0) as client:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.get_model()
            assert f"through the proxy {proxy.address}; no_proxy=0.0.0.0 makes it direct" in str(
                refused.value.details()
            )
            assert "secret" not in str(refused.value)
            with pytest.raises(grpc.aio.AioRpcError, match="through the proxy"):
                await anext(client.generate("hello"))
        set_proxy(monkeypatch, https_proxy=f"http://{proxy.address}", no_proxy="0.0.0.0")
        async with Client(ELSEWHERE, retry_for=0) as client:
            with pytest.raises(grpc.aio.AioRpcError) as direct:
                await client.get_model()
            assert "proxy" not in str(direct.value.details())


@pytest.mark.parametrize(
    "variables",
    [
        {"http_proxy": "http://{}"},
        {"https_proxy": "http://me:secret@{}"},
        {"grpc_proxy": "", "http_proxy": "http://{}"},
        {"grpc_proxy": "http://{}", "http_proxy": CLOSED},
        {"http_proxy": "{}"},
        {"http_proxy": "https://{}"},
        {"HTTP_PROXY": "http://{}"},
        {"http_proxy": "http://{}", "no_proxy": "0.0.0.0"},
        {"http_proxy": "http://{}", "no_proxy": "x, .0.0 "},
        {"http_proxy": "http://{}", "no_proxy": "0.0.0.0/8"},
        {"http_proxy": "http://{}", "no_proxy": "1.0.0.0/8,0.0.0.0:1"},
        {"http_proxy": "http://{}", "no_proxy": "0.0.0.0", "no_grpc_proxy": ""},
        {"http_proxy": "http://{}", "no_proxy": "x", "no_grpc_proxy": "0.0.0.0"},
    ],
    ids=str,
)
async def test_what_is_said_of_a_proxy_is_what_grpc_does(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect_proxy(connects=False) as proxy:
        set_proxy(monkeypatch, **{name: value.format(proxy.address) for name, value in variables.items()})
        own = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(ELSEWHERE, options=own) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await HealthStub(channel).Check(HealthCheckRequest(), timeout=20)
        assert proxy_of(ELSEWHERE) == (proxy.address if proxy.asked else "")


@pytest.mark.parametrize(
    ("target", "exceptions", "is_direct"),
    [
        ("model.example.com:443", "", False),
        ("model.example.com:443", "example.com", True),
        ("dns:///model.EXAMPLE.com:443", ".example.com", True),
        ("model.example.com:443", "*", True),
        ("model.example.com:443", "example.org", False),
        ("localhost:50051", "", True),
        ("127.1.2.3:50051", "", True),
        ("[::1]:50051", "", True),
        ("unix:/run/engine", "", True),
        ("[2001:db8::1]:50051", "2001:db8::/32", True),
        ("[2001:db8::1]:50051", "", False),
    ],
)
def test_this_machine_and_exceptions_are_called_directly(target: str, exceptions: str, is_direct: bool) -> None:
    found = proxy_of(target, {"http_proxy": "http://me:secret@proxy:3128", "no_proxy": exceptions})
    assert found == ("" if is_direct else "proxy:3128")


@pytest.mark.parametrize(
    "url",
    [
        "http://me:sec/ret@proxy:3128",
        "http://me:31/ret@proxy:3128",
        "http://me:sec#ret@proxy:3128",
        "http://me:sec?ret@proxy:3128",
        "http://me:sec[ret@proxy:3128",
        "http://proxy:port",
        "http:proxy:3128",
        "http://",
    ],
)
def test_a_proxy_that_is_no_url_is_refused_without_its_password(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_proxy(monkeypatch, http_proxy=url)
    assert proxy_of("localhost:50051") == ""
    with pytest.raises(ValueError, match="http_proxy in the environment is not http://HOST:PORT") as error:
        Client("model.example.com:443")
    assert "sec" not in str(error.value)
    monkeypatch.setenv("no_proxy", "example.com")
    assert proxy_of("model.example.com:443") == ""


async def test_signs_in_a_password_may_be_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connect_proxy(connects=False) as proxy:
        set_proxy(monkeypatch, http_proxy=f"http://me:%2F%3F%23%5B%5D%40@{proxy.address}")
        async with Client(ELSEWHERE, retry_for=0) as client:
            with pytest.raises(grpc.aio.AioRpcError, match=f"through the proxy {proxy.address}"):
                await client.get_model()
        assert proxy.asked == [ELSEWHERE]
