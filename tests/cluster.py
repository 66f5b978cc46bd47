"""A running scheduler, seen from outside."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import grpc
import psutil

from pagewire.v1.admin_service_pb2 import ClusterState, GetClusterStateRequest, WorkerState
from pagewire.v1.admin_service_pb2_grpc import AdminServiceStub
from pagewire.v1.inference_service_pb2 import GetModelRequest
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client.local import ServiceProcess

OWN = (("grpc.use_local_subchannel_pool", 1),)
"""A channel with a connection of its own."""


async def cluster_state(target: str) -> ClusterState:
    async with grpc.aio.insecure_channel(target) as channel:
        return (await AdminServiceStub(channel).GetClusterState(GetClusterStateRequest())).state


async def until_idle(target: str) -> ClusterState:
    async with asyncio.timeout(30):
        while True:
            state = await cluster_state(target)
            if not state.num_waiting and not any(map(is_busy, state.workers)):
                return state
            await asyncio.sleep(0.01)


async def until_requests(target: str, number: int) -> None:
    async with asyncio.timeout(60):
        while (await cluster_state(target)).num_requests != number:
            pass


@contextmanager
def halted(service: ServiceProcess) -> Iterator[None]:
    """SIGSTOP for the block, so that no request ends before the others arrive."""
    service.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        service.process.send_signal(signal.SIGCONT)


def front_ends(target: str) -> list[psutil.Process]:
    """The processes that listen on the scheduler's port. (Its children are others: see forked_front_ends.py.)"""
    _, _, port = target.rpartition(":")

    def listens(one: Any) -> bool:
        return bool(one.status == psutil.CONN_LISTEN and one.laddr.port == int(port))

    def owner(process: psutil.Process) -> psutil.Process:
        """The parent, if the process is a fork that still has its parent's sockets."""
        parent = process.parent()
        if parent is None or not any(map(listens, parent.net_connections("tcp"))):
            return process
        return owner(parent)

    while True:
        pids = {one.pid for one in psutil.net_connections("tcp") if listens(one)}
        with suppress(psutil.NoSuchProcess):  # it has ended since
            return list({one.pid: one for one in (owner(psutil.Process(pid)) for pid in pids)}.values())


@asynccontextmanager
async def connected_to_each(target: str) -> AsyncIterator[dict[int, InferenceServiceStub]]:
    """A connection to each front end, by process id."""
    stubs: dict[int, InferenceServiceStub] = {}
    channels = []
    try:
        async with asyncio.timeout(60):
            while len(stubs) < 2:
                before = {process.pid: num_connections(process) for process in front_ends(target)}
                channel = grpc.aio.insecure_channel(target, options=OWN)
                channels.append(channel)
                stub = InferenceServiceStub(channel)
                await stub.GetModel(GetModelRequest(), wait_for_ready=True)
                for process in front_ends(target):
                    if num_connections(process) > before.get(process.pid, 0):
                        stubs.setdefault(process.pid, stub)
        yield stubs
    finally:
        for channel in channels:
            await channel.close()


def num_connections(process: psutil.Process) -> int:
    """All TCP connections, clients' included."""
    return sum(connection.status == "ESTABLISHED" for connection in process.net_connections("tcp"))


def is_busy(worker: WorkerState) -> bool:
    """Whether anything runs on the worker or is swapped out."""
    return bool(worker.num_running or worker.num_swapped)


def holds_blocks(worker: WorkerState) -> bool:
    return (worker.num_free_device_blocks, worker.num_free_host_blocks) != (
        worker.num_device_blocks,
        worker.num_host_blocks,
    )
