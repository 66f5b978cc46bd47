"""Keys of a locked scheduler, and the answers of its methods to a caller."""

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_worker_service import FakeWorkerService, serving
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from scheduler_in_process import InProcess, scheduler
from test_processes import WORKER_SIZES, Start, start  # noqa: F401  # a fixture

from pagewire_client import SamplingParams
from pagewire_client.channel import connect, key_metadata
from pagewire_common.serving.reflection import _describe_v1
from scheduler_service.access.keys import ApiKey, Keyring, digest_of

KEYS = {"gold": "key of gold", "iron": "key of iron", "two": "key of two calls", "admin": "key of an operator"}
KEYRING = Keyring(
    [
        ApiKey(id="gold-1", digest=digest_of(KEYS["gold"]), tenant="gold", concurrency=2),
        ApiKey(id="iron-1", digest=digest_of(KEYS["iron"]), tenant="iron", models=frozenset({"fake", "bytes"})),
        ApiKey(id="none-1", digest=digest_of("key of no model"), tenant="none", models=frozenset()),
        ApiKey(id="admin-1", digest=digest_of(KEYS["admin"]), tenant="", admin=True, metrics=True),
    ]
)
LONG = SamplingParams(max_tokens=80, ignore_eos=True, temperature=0)
Codes = dict[str, grpc.StatusCode]
OPEN = "/grpc.health.v1.Health/"


def key_file(path: Path, *names: str) -> Path:
    path.write_text(
        "".join(
            f'[[key]]\nid = "{name}"\ntenant = "{name}"\nsha256 = "{hashlib.sha256(KEYS[name].encode()).hexdigest()}"\n'
            f"admin = {json.dumps(name == 'admin')}\n{'requests_per_minute = 2' * (name == 'two')}\n"
            for name in names
        )
    )
    return path


@asynccontextmanager
async def locked_scheduler(tokenizer: Path, keyring: Keyring) -> AsyncIterator[InProcess]:
    """A scheduler in front of a fake worker."""
    async with serving(FakeWorkerService(tokenizer)) as address, scheduler(address, keyring=keyring) as one:
        await one.engine.model()
        yield one


async def methods(channel: grpc.aio.Channel, metadata: Any) -> list[str]:
    """Every method of every service that reflection lists."""
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(metadata=metadata)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = [service.name for service in (await call.read()).list_services_response.service]
    call.cancel()
    _describe_v1()
    pool = descriptor_pool.Default()
    services = [pool.FindServiceByName(name) for name in names]
    return [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]


async def code_of(channel: grpc.aio.Channel, method: str, metadata: Any) -> grpc.StatusCode:
    """The status of an empty request; OK if there is an answer."""
    call = channel.unary_stream(method)(b"", metadata=metadata, timeout=20)  # whatever kind of method it is
    try:
        async for _ in call:
            call.cancel()
            return grpc.StatusCode.OK
        return await call.code()
    except grpc.aio.AioRpcError as error:
        return error.code()


async def codes(target: str, key: str, *, open_with: str = KEYS["admin"], tls: Path | None = None) -> Codes:
    async with connect(target, tls) as channel:
        listed = await methods(channel, key_metadata(open_with))
        assert len(listed) > 5
        return {method: await code_of(channel, method, key_metadata(key)) for method in listed}


async def refused(call: Any) -> grpc.aio.AioRpcError:
    async def end() -> None:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        await call

    with pytest.raises(grpc.aio.AioRpcError) as error:
        await end()
    return error.value
