"""A fleet with hostile settings, disturbed while it answers all requests together; nothing may be left over."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Self

import psutil
from answers import Answer, ask
from cluster import ClusterState, cluster_state, front_ends, holds_blocks, is_busy
from disturbances import Disturbances
from drawn_requests import Asked
from drawn_settings import Settings
from processes import Member
from tcp_proxy import tcp_proxy

from bench.systems.processes import engine_process
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client.channel import connect

NUM_CHANNELS = 3
IDLE_SECONDS = 60.0
MORE_FILES = 4
"""Files that the engine may have open at the end: connections that read its state."""


class HostileFleet:
    """Scheduler and workers of `settings`, for the block."""

    def __init__(self, model: Path, settings: Settings, draw: Random, seconds: Sequence[float]) -> None:
        environment = {"PAGEWIRE_TEST_GUESSES_ALWAYS": "1"} if settings.guesses else {}
        module = "faulty_worker" if settings.guesses else "worker_service"
        environment["PYTHONPATH"] = f"{Path(__file__).parent}"
        named = ("--model", str(model))
        self.workers = [
            Member(module, [*named, *settings.worker], environment=environment) for _ in range(settings.num_workers)
        ]
        self.counts: Counter[str] = Counter()
        self.left_processes: list[str] = []
        """At the end of the `with` block: members that ended with an error, and processes that still ran."""
        self._named = named
        self._settings = settings
        self._draw = draw
        self._seconds = seconds
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for worker in self.workers:
            self._stack.callback(worker.kill)
            worker.start()
        self._links = [await self._stack.enter_async_context(tcp_proxy(one.address)) for one in self.workers]
        addresses = ",".join(link.address for link in self._links)
        arguments = [*self._named, "--workers", addresses, "--check-invariants", *self._settings.scheduler]
        self._scheduler = Member("scheduler_service", arguments)
        self._stack.callback(self._scheduler.kill)
        for worker in self.workers:
            await asyncio.to_thread(worker.wait_for, "ready")
        self._scheduler.start()
        await asyncio.to_thread(self._scheduler.wait_for, "ready")
        self._num_files = engine_process(self._scheduler.pid).num_fds()
        self._clients = await self._stack.enter_async_context(tcp_proxy(self._scheduler.address))
        return self

    async def answers(self, asked: Sequence[Asked]) -> list[Answer]:
        """Each request's answer, with all sent within a second."""
        disturbances = Disturbances(
            self._draw, self._scheduler, self.workers, self._clients, self._links, self._seconds
        )
        channels = [connect(self._clients.address) for _ in range(NUM_CHANNELS)]
        within = self._draw.choice([0.0, 1.0])
        delays = [within * self._draw.random() for _ in asked]

        async def one(number: int) -> Answer:
            await asyncio.sleep(delays[number])
            return await ask(InferenceServiceStub(channels[number % NUM_CHANNELS]), asked[number], is_disturbed=True)

        disturbing = asyncio.create_task(disturbances.run())
        try:
            return await asyncio.gather(*(one(number) for number in range(len(asked))))
        finally:
            disturbances.is_over = True
            await disturbing
            for channel in channels:
                await channel.close()
            self.counts += disturbances.counts

    async def state(self) -> ClusterState:
        return await cluster_state(self._scheduler.admin_address)

    async def left_over(self, found: Sequence[Answer]) -> list[str]:
        """Requests, blocks and files that are still held, and counts that are too low."""
        ends_at = time.monotonic() + IDLE_SECONDS
        while True:
            state, num_more = await self.state(), self._num_more_files()
            if (is_at_rest(state) and num_more <= MORE_FILES) or time.monotonic() > ends_at:
                break
            await asyncio.sleep(0.05)
        self.counts["preemptions"] += state.num_preemptions
        left = [] if is_at_rest(state) else [f"not at rest: {state}"]
        if num_more > MORE_FILES:
            left.append(f"the engine has {num_more} more files open than before")
        if not self._engines_killed and state.num_output_tokens < sum(one.num_tokens for one in found):
            left.append(f"counted {state.num_output_tokens} tokens, sent {sum(one.num_tokens for one in found)}")
        left += [f"{one.address} ended by itself" for one in (self._scheduler, *self.workers) if not one.is_running]
        return left

    @property
    def _engines_killed(self) -> int:
        return self.counts["engine_killed"] + self.counts["scheduler_killed"]

    def _num_more_files(self) -> int:
        """The engine's open files since it was ready; 0 for a new process."""
        is_same = not self._engines_killed
        return engine_process(self._scheduler.pid).num_fds() - self._num_files if is_same else 0

    async def __aexit__(self, *_: object) -> None:
        try:
            await asyncio.to_thread(self._end)
        finally:
            await self._stack.aclose()

    def _end(self) -> None:
        """End the scheduler and then the workers by SIGTERM. Note the processes that are left."""
        members = [member for member in (self._scheduler, *self.workers) if member.is_running]
        processes = [*front_ends(self._scheduler.address)]
        for member in members:
            main = psutil.Process(member.pid)
            processes += [main, *main.children(recursive=True)]
        for front_end in front_ends(self._scheduler.address):
            processes += front_end.children(recursive=True)
        for member in members:
            if status := member.stop():
                self.left_processes.append(f"{member.address} ended with status {status}")
        _, alive = psutil.wait_procs(set(processes), timeout=20)
        self.left_processes += [f"left: {one}" for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def is_at_rest(state: ClusterState) -> bool:
    """Nothing in flight, no block held, every worker connected."""
    busy = (is_busy(worker) or holds_blocks(worker) or not worker.connected for worker in state.workers)
    return not (state.num_requests or state.num_waiting or any(busy))
