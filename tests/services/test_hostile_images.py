"""Images that were made to do harm, beside ordinary ones: each is refused in a sentence, or read as what it is, and an
ordinary client has the same tokens as alone.

A worker with a real network, a scheduler and a front end in this process. `make soak` sends three thousand.
"""

import asyncio
import base64
import io
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engines import until
from hostile_requests import INSIDE, Draw, changed
from http_edge import http_edge
from image_files import animated_gif, image_file, png, rotated
from scheduler_in_process import InProcess, scheduler
from test_hostile import GROWTH
from tiny_image_models import FAMILIES, make_model, picture
from worker_in_process import ServedWorker, worker_in_process

from pagewire_common.images.head import MAX_IMAGES

ROUTE = "/v1/chat/completions"
FAMILY = "smolvlm"
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}{{ '"
    + FAMILIES[FAMILY].image_token
    + "' }}{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
FINE = {200, 400}
GOOD = [picture(40, 30), picture(12, 60, seed=1), picture(30, 30, seed=2)]
FILES = [
    *(one.data for one in GOOD),
    *(image_file(60, 40, kind) for kind in ("JPEG", "WebP", "GIF")),
    *(rotated(6), animated_gif(1000), image_file(mode="CMYK", kind="JPEG"), image_file(mode="I;16")),
]
REFUSED = [
    *(b"", b"text", b"GIF89a", b"\xff\xd8\xff" * 1000, b"RIFF\0\0\0\0WEBP", GOOD[0].data[:-30], GOOD[0].data[:40]),
    *(
        png(60_000, 60_000, []),
        png(1 << 31, 1, []),
        png(0, 9, []),
        png(9, 9, []),
        png(5700, 5700, [bytes(5701)] * 99)[:-30],
    ),
]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def chat(images: list[bytes], **fields: Any) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": "t5"}]
    for data in images:
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "ignore_eos": True, **fields}


def of_json(body: dict[str, Any]) -> dict[str, Any]:
    return {"data": io.BytesIO(json.dumps(body).encode()), "headers": {"Content-Type": "application/json"}}


def drawn(draw: Draw) -> tuple[dict[str, Any], set[int]]:
    """A chat, and the statuses that are right."""
    images = [draw.choice(FILES) for _ in range(draw.choice([0, 1, 1, 2, 3]))]
    right, roll = {200}, draw.random()
    if roll < 0.3:
        images.insert(draw.randrange(len(images) + 1), draw.choice(REFUSED))
        right = {400}
    elif roll < 0.5 and images:
        images[0], right = changed(draw, images[0]), FINE
    elif roll < 0.52:
        images, right = [GOOD[0].data] * (MAX_IMAGES + draw.choice([0, 1])), {400}  # too many, or too many tokens
    fields = draw.choice([{}, {"temperature": 1.0, "n": 2}, {"stream": True}, {"logit_bias": {"7": 9}}])
    return chat(images, **fields), right if sum(map(len, images)) < 4 << 20 else right | {413}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[str, InProcess, ServedWorker]]:
    """A cache with room for few images, and for few blocks."""
    model = make_model(tmp_path / FAMILY, FAMILY)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    sizes = {"max_num_batched_tokens": 16, "encoder_cache_size": 40, "num_gpu_blocks_override": 60, "block_size": 4}
    async with (
        worker_in_process(model, **sizes) as worker,
        scheduler(worker.address, model=str(model), time_limit=900) as one,
        http_edge(one.link) as url,
    ):
        await one.engine.model()
        yield url, one, worker


@pytest.mark.timeout(900)
async def test_images_that_are_meant_to_do_harm_are_refused_and_change_nothing_for_an_ordinary_client(
    served: tuple[str, InProcess, ServedWorker], request: pytest.FixtureRequest
) -> None:
    (url, one, worker), soaks = served, request.config.getoption("--soak")
    numbers, draw, found = iter(range(3000 if soaks else 40)), random.Random(1), Counter[int | str]()
    ordinary = chat([GOOD[0].data, GOOD[1].data], temperature=0, return_token_ids=True, max_tokens=12)

    async def attack(session: aiohttp.ClientSession) -> None:
        for _ in numbers:
            body, right = drawn(draw)
            leaves = draw.random() / 5 if draw.random() < 0.2 else 30
            try:
                async with asyncio.timeout(leaves), session.post(url + ROUTE, **of_json(body)) as answer:
                    text = await answer.text()
            except TimeoutError:
                assert leaves < 30
                found["left"] += 1
                continue
            found[answer.status] += 1
            assert answer.status in right, (answer.status, text[:300])
            assert answer.status == 200 or not INSIDE.search(text), text[:300]

    async def tokens(session: aiohttp.ClientSession) -> list[int]:
        async with session.post(url + ROUTE, **of_json(ordinary)) as answer:
            return list((await answer.json())["choices"][0]["token_ids"])

    async with aiohttp.ClientSession() as session:
        expected, before = await tokens(session), resident_bytes()
        attacks = asyncio.gather(*(attack(session) for _ in range(6)))
        while not attacks.done():
            assert await tokens(session) == expected
            before = before if sum(found.values()) > 300 else resident_bytes()
        await attacks
    assert {200, 400} <= found.keys()
    await until(lambda: not one.engine.requests.in_flight)
    (core,) = one.engine.workers.serving
    await until(lambda: not core.has_work and not core.steps_in_flight)
    core.encoder_cache.settle()
    core.encoder_cache.check()
    assert not core.encoder_cache.users
    assert core.blocks.device.num_free == core.blocks.device.num_blocks
    assert {(name.digest, name.part) for name in core.encoder_cache._kept} == {
        (name.digest, name.part)
        for name in worker.worker.runner.images._held  # type: ignore[union-attr]
    }
    assert not one.engine.workers.all[0].num_losses
    grown = resident_bytes() - before
    if soaks:
        print(f"\n{dict(found)}; MiB grown: {grown >> 20}")  # noqa: T201
    assert grown < GROWTH
