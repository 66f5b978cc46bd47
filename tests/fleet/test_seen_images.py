"""A trained model answers questions about images over HTTP, through both services."""

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from tiny_seer import HELD_OUT, QUESTION, draw, png, write_seer

from pagewire_client import LocalServer

NUM_IMAGES = 40


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = write_seer(tmp_path_factory.mktemp("seer"))
    small = ["--num-gpu-blocks-override", "64", "--block-size", "8", "--threads", "1", "--no-forms"]
    with LocalServer(str(folder), worker_arguments=small, scheduler_arguments=["--check-invariants"]) as server:
        yield server.http_url


async def test_answers_about_new_images_are_right(url: str) -> None:
    async def ask(session: aiohttp.ClientSession, seed: int) -> bool:
        image, colour = draw(seed)
        data = f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"
        content = [{"type": "image_url", "image_url": {"url": data}}, {"type": "text", "text": QUESTION}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0}
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return bool((await answer.json())["choices"][0]["message"]["content"] == colour)

    async with aiohttp.ClientSession() as session:
        right = await asyncio.gather(*(ask(session, HELD_OUT + number) for number in range(NUM_IMAGES)))
    assert sum(right) >= 0.95 * NUM_IMAGES
