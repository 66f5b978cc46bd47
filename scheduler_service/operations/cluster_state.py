"""The state of the scheduler and its workers, as a message for operators."""

from pagewire.v1 import admin_service_pb2 as pb
from scheduler_service.core import Balancer, Scheduler
from scheduler_service.core.blocks.usage import layer_group_usage
from scheduler_service.engine.front_ends.servicer import FrontEnds
from scheduler_service.engine.worker_link.session import StepSplit
from scheduler_service.engine.workers import Worker


def cluster_state(front_ends: FrontEnds) -> pb.ClusterState:
    """The state at one moment: nothing is awaited here."""
    engine = front_ends.engine
    statistics, departed = engine.requests.statistics, engine.workers.departed
    workers = [_encode_worker(worker) for worker in engine.workers.all]
    return pb.ClusterState(
        start_time_ms=statistics.start_time_ms,
        draining=engine.is_draining,
        num_requests=len(engine.requests.in_flight),
        num_waiting=len(engine.requests.waiting),
        num_prompt_tokens=statistics.num_prompt_tokens,
        num_cached_tokens=statistics.num_cached_tokens,
        num_output_tokens=statistics.num_output_tokens,
        num_losses=departed.num_losses + sum(worker.num_losses for worker in workers),
        num_preemptions=departed.num_preemptions + sum(worker.num_preemptions for worker in workers),
        placement=_encode_placement(engine.requests.waiting.balancer),
        workers=workers,
        front_end_error=front_ends.error,
    )


def _encode_placement(balancer: Balancer) -> pb.PlacementCounts:
    return pb.PlacementCounts(
        placed={reason.name.lower(): count for reason, count in balancer.num_placed.items()},
        left={reason.name.lower(): count for reason, count in balancer.num_left.items()},
        num_overtakes=balancer.num_overtakes,
        num_moved=balancer.num_moved,
    )


def _encode_worker(worker: Worker) -> pb.WorkerState:
    encoder = worker.encoder_counts
    state = pb.WorkerState(
        address=worker.client.address,
        status=f"WORKER_STATUS_{worker.state.name}",
        draining=worker.draining,
        epoch=worker.epoch,
        num_steps=worker.num_steps,
        num_losses=worker.num_losses,
        num_preemptions=worker.num_preemptions,
        last_error=worker.last_error,
        step_split=_encode_split(worker.split),
        num_encoder_queries=encoder.num_queries,
        num_encoder_hits=encoder.num_hits,
        num_encoded_tokens=encoder.num_encoded_tokens,
        num_guessed_tokens=worker.drafts.verified.num_tokens,
        num_accepted_tokens=worker.drafts.right.num_tokens,
        num_guessed_by_position=worker.drafts.verified.by_position(),
        num_accepted_by_position=worker.drafts.right.by_position(),
        proposer=worker.drafts.proposer,
    )
    if (scheduler := worker.scheduler) is not None:
        state.connected = True
        state.last_error = ""
        state.num_running = len(scheduler.running)
        state.num_swapped = len(scheduler.swapped)
        state.num_device_blocks = scheduler.blocks.device.num_blocks
        state.num_free_device_blocks = scheduler.blocks.device.num_free
        state.num_host_blocks = scheduler.blocks.host.num_blocks
        state.num_free_host_blocks = scheduler.blocks.host.num_free
        state.num_preemptions += sum(scheduler.num_preemptions.values())
        state.layer_groups.extend(_encode_layer_groups(scheduler))
    return state


def _encode_layer_groups(scheduler: Scheduler) -> list[pb.LayerGroupState]:
    if scheduler.config.is_encoder:
        return []
    return [
        pb.LayerGroupState(kind=layers.kind, num_held_blocks=num_held, num_cached_blocks=num_cached)
        for layers, num_held, num_cached in layer_group_usage(scheduler.blocks)
    ]


def _encode_split(split: StepSplit) -> pb.StepSplit:
    return pb.StepSplit(
        num_steps=split.num_steps,
        schedule_us=split.schedule // 1000,
        encode_us=split.encode // 1000,
        wire_us=max(split.wire, 0) // 1000,
        move_us=split.move // 1000,
        images_us=split.images // 1000,
        forward_us=split.forward // 1000,
        sample_us=split.sample // 1000,
        guess_us=split.guess // 1000,
        decode_us=split.decode // 1000,
        update_us=split.update // 1000,
        publish_us=split.publish // 1000,
    )
