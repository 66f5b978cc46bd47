"""Completions and chats over HTTP, streamed and whole, while workers are lost."""

import asyncio
import signal
from typing import Any

import openai
from event_streams import Repeated, summed
from fleet_helpers import Serve
from processes import Workers

MODEL = "tiny-llama"
WORDS: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
NUM_CALLS = 8


async def text(client: openai.AsyncOpenAI, number: int) -> str:
    """Of one of the calls: chats and completions in turn, the first half streamed."""
    is_chat, stream = number % 2 == 1, number < NUM_CALLS // 2
    asked = WORDS | {"seed": number, "stream": stream}
    if is_chat:
        said = f"Chat {number}"
        answer: Any = await client.chat.completions.create(messages=[{"role": "user", "content": said}], **asked)
    else:
        answer = await client.completions.create(prompt=f"Completion {number}: ", **asked)
    choices = [choice async for chunk in answer for choice in chunk.choices] if stream else answer.choices
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    if not is_chat:
        return "".join(choice.text for choice in choices)
    return "".join((choice.delta if stream else choice.message).content or "" for choice in choices)


async def test_lost_workers_are_not_seen_over_http(workers: Workers, serve: Serve) -> None:
    members = workers.up(2)
    fleet = await serve([member.address for member in members])
    url = f"http://{fleet.scheduler.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        undisturbed = await asyncio.gather(*(text(client, number) for number in range(NUM_CALLS)))
        is_over = False

        async def keep_up(number: int) -> None:
            """The call, made anew as often as it ends, until the workers have been lost."""
            is_last = False
            while not is_last:
                is_last = is_over
                assert await text(client, number) == undisturbed[number]

        async with asyncio.TaskGroup() as calls:
            for number in range(NUM_CALLS):
                calls.create_task(keep_up(number))
            for num_lost, member in enumerate(members, 1):
                await fleet.until(
                    lambda state: all(worker.connected and worker.num_running > 1 for worker in state.workers)
                )
                member.signal(signal.SIGKILL)
                await fleet.until(
                    lambda state, num_lost=num_lost: sum(worker.num_losses for worker in state.workers) == num_lost
                )
                member.wait()
                member.start()
            await fleet.until(lambda state: all(worker.connected for worker in state.workers))
            is_over = True
    await fleet.check_empty()


async def test_streams_go_on_at_another_scheduler_after_worker_and_scheduler_were_killed(
    workers: Workers, serve: Serve
) -> None:
    """The other scheduler has nothing but the ids of the events."""
    (worker,) = workers.up(1)
    secret = ("--resume-secret", "a secret of two schedulers")
    first = await serve([worker.address], *secret)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "n": 2, "max_tokens": 30},
        "/v1/completions": {"prompt": "a", "max_tokens": 30, "logprobs": 1},
    }
    broken = [
        Repeated(f"http://{first.scheduler.http_address}", route, body | {"stream": True})
        for route, body in bodies.items()
    ]
    wholes = await asyncio.gather(*(request.events() for request in broken))
    for member in (worker, first.scheduler):
        member.signal(signal.SIGKILL)
        member.wait()
    workers.up(1)
    other = await serve([worker.address], *secret)
    for request, whole in zip(broken, wholes, strict=True):
        request.url = f"http://{other.scheduler.http_address}"
        middle = len(whole) // 2
        resumed = await request.events(whole[middle].id)
        assert summed(whole[: middle + 1] + resumed) == summed(whole)
    await other.check_empty()
