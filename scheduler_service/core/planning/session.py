"""What all parts of a worker's scheduler work on: one session of the worker, from its first step to its loss."""

from dataclasses import dataclass

from scheduler_service.core.blocks.manager import BlockManager
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.placement.balancer import Balancer
from scheduler_service.core.placement.worker import Member
from scheduler_service.core.planning.loras import Loras
from scheduler_service.core.planning.steps_in_flight import StepsInFlight
from scheduler_service.core.planning.worker_groups import WorkerGroups
from scheduler_service.core.queues.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class Session:
    """`waiting` and `balancer` are shared with the schedulers of other workers; all else is this worker's own."""

    config: SchedulerConfig
    worker: str
    waiting: WaitingQueue
    balancer: Balancer
    member: Member
    blocks: BlockManager
    in_flight: StepsInFlight
    loras: Loras
    groups: WorkerGroups
