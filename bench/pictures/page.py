"""Makes the pictures of docs/page.md: python -m bench.pictures.page [FOLDER].

Starts a scheduler with the page and two workers with the default model and small pools, sends 40 requests, kills a
worker, and replays the recording. Needs Debian's chromium and the package playwright.
"""

import argparse
import asyncio
import importlib
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from bench.pictures.record import FOLDER, POOL, SONG, START_SECONDS, TEXT, start
from pagewire_client import Client, SamplingParams
from pagewire_client.local import ADMIN, HTTP, ServiceProcess

WORKER = (POOL, "240", "--swap-space", "0.07", "--threads", "1")
SCHEDULER = ("--scheduling-policy", "priority", "--preemption-mode", "swap")
NUM_REQUESTS = 40
NUM_SWAPPED = 3
"""Requests that are swapped when the pictures are taken."""
QUESTION = "What is the capital of France?"


@asynccontextmanager
async def served(recording: Path) -> AsyncIterator[tuple[str, Client, ServiceProcess]]:
    """The page's address, a client, and the worker that will be killed."""
    processes = [start("worker_service", *WORKER) for _ in range(2)]
    try:
        addresses = [str(worker.wait_for("listening", START_SECONDS)["address"]) for worker in processes]
        options = (*ADMIN, *HTTP, *SCHEDULER, "--workers", ",".join(addresses), "--record", str(recording))
        processes.append(start("scheduler_service", *options))
        listening = processes[-1].wait_for("listening", START_SECONDS)
        for process in processes:
            process.wait_for("ready", START_SECONDS)
        async with Client(str(listening["address"])) as client:
            yield f"http://{listening['http']}", client, processes[0]
    finally:
        for process in reversed(processes):
            await asyncio.to_thread(process.stop)


@asynccontextmanager
async def replayed(recording: Path) -> AsyncIterator[str]:
    """The address of the page that shows a recording."""
    program = (sys.executable, "-m", "scheduler_service.replay", str(recording), "--page")
    replay = await asyncio.create_subprocess_exec(
        *program, "--http-listen", "127.0.0.1:0", stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    assert replay.stderr is not None
    try:
        while " is at " not in (line := (await replay.stderr.readline()).decode()):
            pass
        yield line.partition(" is at ")[2].partition(";")[0]
    finally:
        replay.terminate()
        await replay.wait()


async def ask(client: Client, number: int) -> None:
    """Read one of the requests' whole output."""
    prompt = f"{number} " * (number % 3) + (TEXT * 2 + SONG * (number % 4) + f" Number {number}:")
    sampling = SamplingParams(max_tokens=100 + 40 * (number % 7), ignore_eos=True, seed=number)
    tenant, priority = ("blue", 0) if number % 5 == 0 else ("green", 1)
    async for _ in client.generate(prompt, sampling, request_id=f"r{number + 1}", tenant=tenant, priority=priority):
        pass


async def chat(page: Any, path: Path) -> None:
    await page.get_by_label("temperature").fill("0.7")  # at the default of 0.2, all tokens are probable
    await page.get_by_label("seed").fill("3")
    await page.get_by_label("Question").fill(QUESTION)
    await page.get_by_label("Question").press("Enter")
    await page.locator(".finish").wait_for()
    await page.locator(".code summary").click()
    await page.locator(".token").nth(3).hover()
    await page.screenshot(path=path)


async def load(page: Any, url: str, client: Client, worker: ServiceProcess, folder: Path) -> None:
    await page.goto(f"{url}/#live")
    asking = [asyncio.create_task(ask(client, number)) for number in range(NUM_REQUESTS)]
    rows = page.locator(".live-requests tbody tr")
    await rows.filter(has_text="swapped").nth(NUM_SWAPPED - 1).wait_for()
    await page.screenshot(path=folder / "page-load.png", full_page=True)
    await page.emulate_media(color_scheme="dark")
    await rows.filter(has_text="swapped").get_by_role("button").first.click()
    await page.evaluate("scrollTo(0, 0)")
    await asyncio.sleep(1)
    await page.screenshot(path=folder / "page-swapped-dark.png")
    await page.emulate_media(color_scheme="light")
    worker.process.kill()
    await page.locator(".live-events .worker_lost").first.wait_for()
    await asyncio.sleep(1.5)
    await page.screenshot(path=folder / "page-worker-lost.png")
    await asyncio.gather(*asking)


async def show_preemption(page: Any, url: str, path: Path) -> None:
    """Show the first step that preempts."""
    async with aiohttp.ClientSession(url) as session:
        step, found = 1, None
        while found is None:
            async with session.get(f"/page/recording?from={step}") as answer:
                frames = (await answer.json())["frames"]
            found = next((one["step"] for one in frames if "is preempted" in " ".join(one["decisions"])), None)
            step = frames[-1]["step"] + 1
    await page.goto(url)
    await page.get_by_role("slider", name="step").fill(str(found))
    await page.get_by_text("is preempted").first.wait_for()
    await page.screenshot(path=path)


async def draw(folder: Path) -> None:
    playwright: Any = importlib.import_module("playwright.async_api")
    async with playwright.async_playwright() as program:
        browser = await program.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        with tempfile.TemporaryDirectory() as temporary:
            recording = Path(temporary) / "today.rec"
            page = await browser.new_page(viewport={"width": 1280, "height": 900})
            page.set_default_timeout(1000 * START_SECONDS)
            async with served(recording) as (url, client, worker):
                await page.goto(url)
                await chat(page, folder / "page-play.png")
                await load(page, url, client, worker, folder)
            async with replayed(recording) as url:
                await show_preemption(page, url, folder / "page-recording.png")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pictures.page", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="where the pictures are written")
    asyncio.run(draw(parser.parse_args().folder))


if __name__ == "__main__":
    main()
