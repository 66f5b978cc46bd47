"""Encodes what the worker tells the scheduler: the answers to steps, and itself."""

from collections.abc import Sequence

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1.worker_service_pb2 import GetWorkerInfoResponse
from worker_service.session.step import Limits, ModelOutput, SampleLogprobs, WorkerInfo

PROTOCOL_VERSION = 4
_PREFIX = "POOLING_TYPE_"


def encode_model_output(epoch: int, step_id: int, output: ModelOutput) -> pb.ModelOutput:
    return pb.ModelOutput(
        epoch=epoch,
        step_id=step_id,
        token_ids=output.token_ids,
        num_tokens=output.num_tokens,
        num_draft_tokens=output.num_draft_tokens,
        num_draft_tokens_wanted=output.num_draft_tokens_wanted,
        logprobs=[_encode_logprobs(logprobs) for logprobs in output.logprobs],
        prompt_logprobs=[_encode_logprobs(logprobs) for logprobs in output.prompt_logprobs],
        timing=pb.StepTiming(
            move_us=output.timing.move_us,
            forward_us=output.timing.forward_us,
            sample_us=output.timing.sample_us,
            guess_us=output.timing.guess_us,
            encode_us=output.timing.encode_us,
        ),
        failed_sequence_ids=output.failed_sequence_ids,
        barred_sequence_ids=output.barred_sequence_ids,
        failed_items=[pb.EncoderItem(**item._asdict()) for item in output.failed_items],
        prepared_items=[pb.EncoderItem(**item._asdict()) for item in output.prepared_items],
        vectors=[pb.SequenceVectors(sequence_id=one.sequence_id, data=one.data) for one in output.vectors],
    )


def encode_worker_info(
    info: WorkerInfo,
    limits: Limits,
    epoch: int,
    *,
    in_session: bool = False,
    instance_id: str = "",
    adapters: Sequence[str] = (),
) -> GetWorkerInfoResponse:
    """epoch: the newest session's. in_session: whether this session is open."""
    return GetWorkerInfoResponse(
        protocol_version=PROTOCOL_VERSION,
        model_id=info.model_id,
        model_fingerprint=info.model_fingerprint,
        dtype=info.dtype,
        device=info.device,
        block_size=limits.block_size,
        num_device_blocks=limits.num_device_blocks,
        num_host_blocks=limits.num_host_blocks,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        vocabulary_size=limits.vocabulary_size,
        features=info.features,
        swap_bytes_per_second=info.swap_bytes_per_second,
        prefill_tokens_per_second=info.prefill_tokens_per_second,
        block_bytes=info.block_bytes,
        epoch=epoch,
        sliding_window=info.sliding_window,
        in_session=in_session,
        instance_id=instance_id,
        num_speculative_tokens=limits.num_speculative_tokens,
        max_loras=limits.max_loras,
        adapters=adapters,
        max_cpu_loras=limits.max_cpu_loras,
        lora_copy_seconds=info.lora_copy_seconds,
        embedding_size=limits.embedding_size,
        pooling_type=f"{_PREFIX}{info.pooling_type.name}" if info.pooling_type else None,
        normalizes=info.normalizes,
        num_labels=limits.num_labels,
        max_encoder_len=limits.max_encoder_len,
        max_num_encoder_tokens=limits.max_num_encoder_tokens,
        feature_bytes=limits.feature_bytes,
        layer_groups=[pb.LayerGroup(**group._asdict()) for group in limits.layer_groups],
        prompt_embeds_size=limits.prompt_embeds_size,
        encoder_cache_size=limits.encoder_cache_size,
        encoder_budget=limits.encoder_budget,
        images_attend_both_ways=limits.images is not None and limits.images.attends_both_ways,
    )


def _encode_logprobs(logprobs: SampleLogprobs) -> pb.SampleLogprobs:
    return pb.SampleLogprobs(
        sequence_id=logprobs.sequence_id,
        width=logprobs.width,
        token_ids=logprobs.token_ids,
        logprobs=logprobs.logprobs,
        ranks=logprobs.ranks,
    )
