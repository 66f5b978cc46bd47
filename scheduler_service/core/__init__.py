"""The scheduling brain: standard library only, so no gRPC, protobuf, torch, asyncio, clock or I/O.

A `Scheduler` plans the steps of one worker; several share one `WaitingQueue`.
"""

from scheduler_service.core.block_allocator import BlockAllocator
from scheduler_service.core.block_manager import AllocStatus, BlockManager
from scheduler_service.core.budget import SchedulingBudget
from scheduler_service.core.config import PhaseRule, PreemptionMode, SchedulerConfig
from scheduler_service.core.fair_queue import FairQueue
from scheduler_service.core.outputs import ModelOutput, ScheduledSequence, SchedulerOutput, SequenceOutput
from scheduler_service.core.placement import Balancer, Placement, PlacementReason
from scheduler_service.core.priority_queue import PriorityQueue
from scheduler_service.core.queue import WaitingQueue
from scheduler_service.core.sampling_params import SamplingParams
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.sequence import Sequence, SequenceGroup, SequenceStatus

__all__ = [
    "AllocStatus",
    "Balancer",
    "BlockAllocator",
    "BlockManager",
    "FairQueue",
    "ModelOutput",
    "PhaseRule",
    "Placement",
    "PlacementReason",
    "PreemptionMode",
    "PriorityQueue",
    "SamplingParams",
    "ScheduledSequence",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulingBudget",
    "Sequence",
    "SequenceGroup",
    "SequenceOutput",
    "SequenceStatus",
    "WaitingQueue",
]
