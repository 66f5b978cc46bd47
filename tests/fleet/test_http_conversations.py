"""Conversations of agents over HTTP, through preemptions and killed workers: the same events as undisturbed."""

import asyncio
import json
import random
import signal
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fleet_helpers import Fleet, Scale, Serve
from http_bodies import TOOL
from processes import Member, Supervisor, worker
from tiny_agent import write_agent

NUM_CONVERSATIONS, NUM_TURNS, NUM_KILLS = 20, 6, 10
NUM_WORKERS, SMALL_POOL = 3, 320
"""Blocks of 8 tokens. A conversation ends with about 1,300 tokens, so two fit into the small pool."""
TURNS: list[dict[str, Any]] = [
    {"tool_choice": "required", "chat_template_kwargs": {"enable_thinking": False}},
    {"tool_choice": "auto", "thinking_token_budget": 20},
    {"tool_choice": "none", "stop": ["e", "a"], "chat_template_kwargs": {"enable_thinking": False}},
]

Events = list[tuple[str, str]]
"""Kinds and texts. Adjacent texts of a kind are one, because a delta may have one token or several."""


def merged(events: Events) -> Events:
    return [(kind, "".join(text for _, text in group)) for kind, group in groupby(events, lambda event: event[0])]


def events_of(message: dict[str, Any]) -> Events:
    """Of a whole message or of a delta."""
    found = [(kind, message[kind]) for kind in ("reasoning_content", "content") if message.get(kind)]
    for call in message.get("tool_calls", ()):
        found += [("name", call["function"]["name"])] if "name" in call["function"] else []
        found += [("arguments", call["function"]["arguments"])] if call["function"]["arguments"] else []
    return found


class Conversations:
    """`NUM_CONVERSATIONS`, each of `NUM_TURNS`. `expected`: the events of each turn; the first run adds them."""

    def __init__(self, url: str, expected: dict[tuple[int, int], Events]) -> None:
        self._url, self._expected = f"{url}/v1/chat/completions", expected
        self.num_same = 0

    async def run(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
            for streams in (True, False) if not self._expected else (None,):
                async with asyncio.TaskGroup() as group:
                    for kind in (True, False) if streams is None else (streams,):
                        for number in range(NUM_CONVERSATIONS):
                            group.create_task(self._converse(session, number, streams=kind))

    async def _converse(self, session: aiohttp.ClientSession, number: int, *, streams: bool) -> None:
        messages: list[dict[str, Any]] = [{"role": "system", "content": f"Conversation {number}"}]
        for turn in range(NUM_TURNS):
            messages.append({"role": "user", "content": f"Turn {turn}: what is it?"})
            asked = {"messages": messages, "tools": [TOOL], "temperature": 1.0, "seed": 100 * number + turn}
            asked |= {"max_tokens": 80, "stream": streams, "parallel_tool_calls": False}
            asked |= TURNS[(number + turn) % len(TURNS)]
            async with session.post(self._url, json=asked) as answer:
                assert answer.status == 200, await answer.text()
                found = await (streamed(answer) if streams else whole(answer))
            expected = self._expected.setdefault((number, turn), found)
            if streams:
                assert found == expected, (number, turn)
            else:
                assert by_kind(found) == by_kind(expected), (number, turn)
            self.num_same += 1
            texts = by_kind(found)
            message = {name: texts.get(name) for name in ("content", "reasoning_content")}
            calls: list[Any] = []
            if texts["end"] == "tool_calls":
                function = {"name": texts["name"], "arguments": texts["arguments"]}
                calls = [{"id": f"call_{turn}", "type": "function", "function": function}]
            messages.append({"role": "assistant", "tool_calls": calls} | message)
            if calls:
                messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": f"{turn} degrees"})


def by_kind(events: Events) -> dict[str, str]:
    """The texts of each kind. A whole answer does not say in which order they came."""
    kinds = dict.fromkeys(kind for kind, _ in events)
    return {kind: "".join(text for one, text in events if one == kind) for kind in kinds}


async def whole(answer: aiohttp.ClientResponse) -> Events:
    found = await answer.json()
    (choice,) = found["choices"]
    return [*events_of(choice["message"]), ("end", choice["finish_reason"])]


async def streamed(answer: aiohttp.ClientResponse) -> Events:
    found: Events = []
    *events, done, nothing = (await answer.text()).split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    for event in events:
        (choice,) = json.loads(event.removeprefix("data: "))["choices"]
        found += events_of(choice["delta"])
        found += [("end", choice["finish_reason"])] if choice["finish_reason"] else []
    return merged(found)


@pytest.mark.timeout(1800)
async def test_conversations_have_the_same_events_through_preemptions_and_killed_workers(
    serve: Serve, scale: Scale, tmp_path: Path
) -> None:
    """Each is there whole and streamed, and all at once want four times the blocks that there are."""
    if not scale.is_full:
        pytest.skip("make chaos runs it")
    model = write_agent(tmp_path)
    ample, *small = (
        worker(model, "--num-gpu-blocks-override", str(size)) for size in (4096, *[SMALL_POOL] * NUM_WORKERS)
    )
    expected: dict[tuple[int, int], Events] = {}
    with Supervisor([ample.start()]):
        fleet = await serve([ample.address], model=model)
        await Conversations(f"http://{fleet.scheduler.http_address}", expected).run()
        assert not (await fleet.state()).num_preemptions
    kinds = Counter(kind for events in expected.values() for kind, _ in events)
    assert kinds.keys() == {"reasoning_content", "content", "name", "arguments", "end"}, kinds
    with Supervisor([member.start() for member in small]) as supervisor:
        fleet = await serve([member.address for member in small], model=model)
        conversations = Conversations(f"http://{fleet.scheduler.http_address}", expected)
        killing = asyncio.create_task(kill_at_random(fleet, small))
        while len(supervisor.statuses) < NUM_KILLS:
            await conversations.run()
            assert not killing.done()
        killing.cancel()
        state = await fleet.check_empty()
        print(  # noqa: T201
            f"{conversations.num_same} answers are the same through {len(supervisor.statuses)} kills and "
            f"{state.num_preemptions} preemptions; events: {dict(kinds)}"
        )


async def kill_at_random(fleet: Fleet, members: list[Member]) -> None:
    """After the first preemption, SIGKILL a random worker at a random time whenever two workers compute something."""
    draw = random.Random(5)
    await fleet.until(lambda state: state.num_preemptions > 0, 300)
    while True:
        state = await fleet.until(lambda state: sum(one.num_running > 0 for one in state.workers) > 1, 300)
        await asyncio.sleep(draw.uniform(0, 2))
        victim = draw.choice([one.address for one in state.workers if one.num_running])
        (member,) = [member for member in members if member.address == victim]
        if member.is_running:
            member.signal(signal.SIGKILL)
