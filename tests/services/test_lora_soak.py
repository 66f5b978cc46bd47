"""Adapters that come and go for a long time leave nothing behind, and every request of theirs ends.

`make soak` sends 4,000 requests of 200 adapters, `make test` as many as take a few seconds.
"""

import asyncio
import random
from pathlib import Path

import grpc
import psutil
import pytest
from engines import until
from lora_helpers import Asked, outputs, serving
from tiny_adapters import write_adapter

from pagewire_client import Client
from pagewire_client.admin import Admin

SLOTS, PLACES = 4, 8
GROWTH = 32 << 20  # bytes
SAMPLING = {"temperature": 0, "max_tokens": 4}


@pytest.mark.timeout(1800)
async def test_adapters_that_come_and_go_leave_nothing(
    pytestconfig: pytest.Config, tiny_model_directory: Path, tmp_path: Path
) -> None:
    is_long = bool(pytestconfig.getoption("--soak", default=False))
    num_adapters, num_requests = (200, 400) if is_long else (20, 20)
    folder, draw = tmp_path / "adapters", random.Random(2)
    names = [f"a{number}" for number in range(num_adapters)]
    for number, name in enumerate(names):
        write_adapter(folder / name, number, rank=1 + number % 4)
    weights = [1 / rank for rank in range(1, num_adapters + 1)]
    first = 0
    async with (
        serving(tiny_model_directory, folder, time_limit=1800, max_loras=SLOTS, max_cpu_loras=PLACES) as (one, worker),
        Client(one.target) as client,
        Admin(one.admin_target) as admin,
    ):
        (loop,) = one.engine.workers.all
        held = worker.worker.adapters
        expected = {name: await outputs(client, "abc", name, **SAMPLING) for name in names[:10]}

        async def reload() -> None:
            """An operator unloads one and loads it again, as fast as it goes."""
            while True:
                name = draw.choice(names)
                await admin.unload_adapter(name)
                while name not in {adapter.name for adapter in one.engine.adapters.catalogue.listed}:
                    try:
                        await admin.load_adapter(name)
                    except grpc.aio.AioRpcError as error:
                        assert error.code() is grpc.StatusCode.UNAVAILABLE  # all places are needed  # noqa: PT017

        async def ask(asked: Asked) -> None:
            prompt, name, sampling = asked
            try:
                found = await outputs(client, prompt, name, **sampling)
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.NOT_FOUND  # it is unloaded at the moment  # noqa: PT017
            else:
                assert found == expected.get(name, found)

        operator = asyncio.create_task(reload())
        for round_number in range(10):
            asked: list[Asked] = [("abc", name, SAMPLING) for name in draw.choices(names, weights, k=num_requests)]
            await asyncio.gather(*map(ask, asked))
            assert len(held.fingerprints) <= PLACES
            if round_number == 0:
                first = psutil.Process().memory_info().rss
            elif is_long:
                print(f"{psutil.Process().memory_info().rss >> 20} MiB, {loop.fetch_counts.num_adapters} brought")  # noqa: T201
        operator.cancel()
        await asyncio.gather(operator, return_exceptions=True)
        assert operator.cancelled()
        assert psutil.Process().memory_info().rss < first + GROWTH
        assert loop.num_losses == 0
        await until(lambda: not one.engine.requests.in_flight and not one.engine.adapters.catalogue.leaving)
        assert not one.engine.requests.waiting.live_adapters
        for name in names:
            if name in {adapter.name for adapter in one.engine.adapters.catalogue.listed}:
                await admin.unload_adapter(name)
        await until(lambda: not held.fingerprints)
        assert not one.engine.adapters.catalogue.wanted
        assert not one.engine.requests.waiting.balancer.adapter_directory
