"""Looks at a running scheduler from outside."""

import asyncio

import grpc

from pagewire.v1.admin_service_pb2 import ClusterState, GetClusterStateRequest, WorkerState
from pagewire.v1.admin_service_pb2_grpc import AdminServiceStub


async def cluster_state(target: str) -> ClusterState:
    async with grpc.aio.insecure_channel(target) as channel:
        return (await AdminServiceStub(channel).GetClusterState(GetClusterStateRequest())).state


async def until_idle(target: str) -> ClusterState:
    """The cluster's state once nothing waits or runs."""
    async with asyncio.timeout(30):
        while True:
            state = await cluster_state(target)
            if not state.num_waiting and not any(map(is_busy, state.workers)):
                return state
            await asyncio.sleep(0.01)


def is_busy(worker: WorkerState) -> bool:
    """Whether anything runs there or has been swapped out."""
    return bool(worker.num_running or worker.num_swapped)


def holds_blocks(worker: WorkerState) -> bool:
    """Whether a sequence holds any of the worker's blocks."""
    return (worker.num_free_device_blocks, worker.num_free_host_blocks) != (
        worker.num_device_blocks,
        worker.num_host_blocks,
    )
