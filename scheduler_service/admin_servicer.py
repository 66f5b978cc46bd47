"""AdminService: the scheduler's state in numbers. Only the state of one moment so far; the rest is UNIMPLEMENTED."""

from typing import Any, NoReturn

import grpc

from pagewire.v1 import admin_service_pb2 as pb
from pagewire.v1.admin_service_pb2_grpc import AdminServiceServicer
from pagewire_common.errors import RequestError
from scheduler_service.engine import Engine
from scheduler_service.step_split import StepSplit

Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(AdminServiceServicer):
    """What an operator sees; see the .proto for its contract."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def GetClusterState(self, request: pb.GetClusterStateRequest, context: Context) -> pb.GetClusterStateResponse:
        workers = []
        for worker in self._engine.workers:
            state = pb.WorkerState(
                address=worker.client.address,
                epoch=worker.epoch,
                num_steps=worker.num_steps,
                num_preemptions=worker.num_preemptions,
                last_error=worker.last_error,
                step_split=_encode_split(worker.split),
            )
            if (scheduler := worker.scheduler) is not None:
                state.connected = True
                state.last_error = ""
                state.num_running = len(scheduler.running)
                state.num_device_blocks = scheduler.blocks.device.num_blocks
                state.num_free_device_blocks = scheduler.blocks.device.num_free
                state.num_swapped = len(scheduler.swapped)
                state.num_host_blocks = scheduler.blocks.host.num_blocks
                state.num_free_host_blocks = scheduler.blocks.host.num_free
                state.num_preemptions += sum(scheduler.num_preemptions.values())
            workers.append(state)
        return pb.GetClusterStateResponse(state=pb.ClusterState(num_waiting=len(self._engine.waiting), workers=workers))

    async def WatchClusterState(self, request: pb.WatchClusterStateRequest, context: Context) -> NoReturn:  # type: ignore[override]
        _refuse("WatchClusterState")

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Context) -> NoReturn:
        _refuse("DrainWorker")

    async def UndrainWorker(self, request: pb.UndrainWorkerRequest, context: Context) -> NoReturn:
        _refuse("UndrainWorker")


def _encode_split(split: StepSplit) -> pb.StepSplit:
    return pb.StepSplit(
        num_steps=split.num_steps,
        schedule_us=split.schedule // 1000,
        encode_us=split.encode // 1000,
        wire_us=max(split.wire, 0) // 1000,
        move_us=split.move // 1000,
        forward_us=split.forward // 1000,
        sample_us=split.sample // 1000,
        decode_us=split.decode // 1000,
        update_us=split.update // 1000,
        publish_us=split.publish // 1000,
    )


def _refuse(method: str) -> NoReturn:
    raise RequestError(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not implemented by this server")
