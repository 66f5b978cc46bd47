"""Streams over HTTP, through the gateway, while workers are lost."""

import asyncio
import signal

import openai
from fleet_helpers import Serve
from processes import Workers, free_port

from pagewire_client.http.gateway import Gateway


async def test_a_lost_worker_is_not_seen_over_http(workers: Workers, serve: Serve) -> None:
    members = workers.up(2)
    fleet = await serve([member.address for member in members])
    with Gateway(fleet.scheduler.address, f"127.0.0.1:{free_port()}") as gateway:
        await asyncio.to_thread(gateway.wait_until_ready, 60)
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            (model,) = (await client.models.list()).data

            async def text(number: int) -> str:
                stream = await client.completions.create(
                    model=model.id,
                    prompt=f"Stream {number}: ",
                    max_tokens=100,
                    temperature=1.0,
                    seed=number,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

            undisturbed = await asyncio.gather(*map(text, range(8)))
            is_lost = False

            async def keep_up(number: int) -> None:
                """The stream, begun anew as often as it ends, until the worker is lost."""
                is_last = False
                while not is_last:
                    is_last = is_lost
                    assert await text(number) == undisturbed[number]

            async with asyncio.TaskGroup() as streams:
                for number in range(8):
                    streams.create_task(keep_up(number))
                await fleet.until(lambda state: all(worker.num_running > 1 for worker in state.workers))
                members[0].signal(signal.SIGKILL)
                await fleet.until(lambda state: any(worker.num_losses for worker in state.workers))
                is_lost = True
    assert (await fleet.check_empty()).num_losses == 1
