"""Plans the steps of workers with the standard library alone: no gRPC, torch, asyncio, clock or I/O.

A `Scheduler` plans the steps of one worker. All schedulers share one `WaitingQueue`.
"""

from scheduler_service.core.blocks.allocator import BlockAllocator
from scheduler_service.core.blocks.manager import AllocStatus, BlockManager
from scheduler_service.core.config import PhaseRule, PreemptionMode, SchedulerConfig
from scheduler_service.core.groups.encoder_input import EncoderInput
from scheduler_service.core.groups.pooling_params import PoolingParams, PoolingType
from scheduler_service.core.groups.prompt_item import EncoderItem, ImagePart, PromptItem
from scheduler_service.core.groups.sampling_params import SamplingParams, TranscriptParams
from scheduler_service.core.groups.sequence import Sequence, SequenceGroup
from scheduler_service.core.groups.sequence_status import SequenceStatus
from scheduler_service.core.outputs import ModelOutput, ScheduledSequence, SchedulerOutput, SequenceOutput
from scheduler_service.core.placement.balancer import Balancer
from scheduler_service.core.placement.choice import Placement, PlacementReason
from scheduler_service.core.placement.worker import WorkerScheduler
from scheduler_service.core.planning.step import SchedulingBudget
from scheduler_service.core.queues.fair_queue import FairQueue
from scheduler_service.core.queues.priority_queue import PriorityQueue
from scheduler_service.core.queues.waiting_queue import WaitingQueue
from scheduler_service.core.scheduler import Scheduler

__all__ = [
    "AllocStatus",
    "Balancer",
    "BlockAllocator",
    "BlockManager",
    "EncoderInput",
    "EncoderItem",
    "FairQueue",
    "ImagePart",
    "ModelOutput",
    "PhaseRule",
    "Placement",
    "PlacementReason",
    "PoolingParams",
    "PoolingType",
    "PreemptionMode",
    "PriorityQueue",
    "PromptItem",
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
    "TranscriptParams",
    "WaitingQueue",
    "WorkerScheduler",
]
