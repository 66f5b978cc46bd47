"""The codec of workers' messages. No other file uses both these messages and the core's types."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.sequence_group_pb2 import GroupSampling, TokenSequence
from pagewire_common.sampling import NUMBERS
from scheduler_service.core import (
    EncoderItem,
    ModelOutput,
    PoolingParams,
    SamplingParams,
    SchedulerOutput,
    TranscriptParams,
)
from scheduler_service.core.groups.sequence import EncoderSequence
from scheduler_service.core.outputs import Fork, NewSequence, TokenLogprobs
from scheduler_service.wire.messages import encode_fields, fill_column, item_fields

PROTOCOL_VERSION = 4


class WorkerInfo(NamedTuple):
    protocol_version: int
    model_id: str
    model_fingerprint: str
    dtype: str
    device: str
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    vocabulary_size: int
    swap_bytes_per_second: int
    prefill_tokens_per_second: int
    block_bytes: int
    sliding_window: int
    epoch: int
    in_session: bool
    instance_id: str
    features: Sequence[str] = ()
    num_speculative_tokens: int = 0
    max_loras: int = 0
    adapters: Sequence[str] = ()
    max_cpu_loras: int = 0
    lora_copy_seconds: float = 0.0
    embedding_size: int = 0
    pooling_type: int = 0
    normalizes: bool = False
    num_labels: int = 0
    max_encoder_len: int = 0
    max_num_encoder_tokens: int = 0
    feature_bytes: int = 0
    layer_groups: Sequence[pb.LayerGroup] = ()
    prompt_embeds_size: int = 0
    encoder_cache_size: int = 0
    encoder_budget: int = 0
    images_attend_both_ways: bool = False


def decode_worker_info(message: worker_pb.GetWorkerInfoResponse) -> WorkerInfo:
    return WorkerInfo(**{name: getattr(message, name) for name in WorkerInfo._fields})


def _fill_sampling(message: GroupSampling, sampling: SamplingParams) -> None:
    """Write the parameters that a worker reads. A simulation's requests have no numbers for the sampler."""
    numbers: dict[str, Any] = {
        name: value
        for name, number in NUMBERS.items()
        if (value := getattr(sampling, name, number.default)) != number.default
    }
    message.MergeFrom(
        GroupSampling(
            **numbers,
            seed=sampling.seed,
            min_tokens=sampling.min_tokens,
            eos_token_ids=sorted(sampling.end_token_ids),
            logprobs=sampling.num_logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            logit_bias=sampling.logit_bias,
            bad_words=[TokenSequence(token_ids=word) for word in sampling.bad_words],
            form=sampling.form,
            beam_width=sampling.beam_width,
        )
    )
    fill_column(message, "allowed_token_ids", sampling.allowed_token_ids)
    if sampling.pooling is not None:
        encode_fields(PoolingParams, sampling.pooling, message.pooling)
    if sampling.transcript is not None:
        encode_fields(TranscriptParams, sampling.transcript, message.transcript)


def _encode_table(block_ids: list[int]) -> list[int]:
    """0 replaces blocks behind the sliding window, which the worker never reads."""
    return [block if block > 0 else 0 for block in block_ids]


def _fill_further_tables(messages: Any, tables: Sequence[list[int]]) -> None:
    for table in tables:
        fill_column(messages.add(), "block_ids", _encode_table(table))


def _fill_new_sequence(message: pb.NewSequence, new: NewSequence) -> None:
    sequence = new.sequence
    message.sequence_id = sequence.id
    message.num_computed_tokens = new.num_computed_tokens
    fill_column(message, "block_ids", _encode_table(new.block_ids))
    _fill_further_tables(message.further_tables, new.further_tables)
    message.adapter_id = sequence.group.adapter_id
    message.trace_parent = sequence.group.trace_parent
    if isinstance(sequence, EncoderSequence):
        message.encoder_input.num_tokens = sequence.num_prompt_tokens
        if not new.num_computed_tokens:
            fill_column(message.encoder_input, "token_ids", sequence.input.token_ids)
            message.encoder_input.features = sequence.input.features
        return
    fill_column(message, "token_ids", sequence.tokens_between(0, sequence.num_tokens))
    message.num_prompt_tokens = sequence.num_prompt_tokens
    _fill_sampling(message.sampling, sequence.sampling)
    message.index = sequence.index
    if sequence.sampling.form:
        message.form_owner = hashlib.blake2b(sequence.group.tenant.encode(), digest_size=8).digest()
    to_send = set(new.items_sent)
    for item in sequence.group.items:
        sent = item if item.digest in to_send else item._replace(data=b"", num_bytes=0)
        to_send.discard(item.digest)  # equal items of a prompt are sent once
        message.items.add(**item_fields(sent))
    if sequence.group.encoder is not None:
        message.encoder_sequence_id = sequence.group.encoder.id


def _fill_fork(message: pb.Fork, fork: Fork) -> None:
    message.parent_sequence_id = fork.parent_id
    message.child_sequence_id = fork.child.id
    message.num_tokens = fork.num_tokens
    fill_column(message, "token_ids", fork.child.tokens_between(fork.num_tokens, fork.child.num_tokens))
    message.num_computed_tokens = fork.num_computed_tokens
    fill_column(message, "block_ids", _encode_table(fork.block_ids))
    _fill_further_tables(message.further_tables, fork.further_tables)
    message.index = fork.child.index


def encode_scheduler_output(output: SchedulerOutput, epoch: int) -> pb.SchedulerOutput:
    """Columns with only default values are omitted."""
    message = pb.SchedulerOutput(
        epoch=epoch,
        step_id=output.step_id,
        sequence_ids=[scheduled.sequence.id for scheduled in output.scheduled],
        finished=output.finished,
        preempted=output.preempted,
        dropped_items=output.dropped_items,
    )
    for name in output.items_to_encode:
        message.items_to_encode.add(digest=name.digest, part=name.part)
    for name in output.dropped_embeddings:
        message.dropped_embeddings.add(digest=name.digest, part=name.part)
    for name in output.images_ahead:
        message.images_ahead.add(digest=name.digest, part=name.part)
    # Created in place: protobuf would serialize and parse a finished message again.
    for sequence_id, start, block_ids, layer_group in output.block_table_updates:
        message.block_table_updates.add(
            sequence_id=sequence_id, start=start, block_ids=_encode_table(block_ids), layer_group=layer_group
        )
    for new in output.new_sequences:
        _fill_new_sequence(message.new_sequences.add(), new)
    for fork in output.forks:
        _fill_fork(message.forks.add(), fork)
    if output.num_draft_tokens or output.num_tokens != len(output.scheduled):
        message.num_scheduled_tokens.extend(scheduled.num_tokens for scheduled in output.scheduled)
    if output.num_samples != len(output.scheduled):
        message.samples.extend(scheduled.samples for scheduled in output.scheduled)
    if output.num_draft_tokens:
        message.num_draft_tokens.extend(output.num_draft_tokens.get(s.sequence, 0) for s in output.scheduled)
    for pairs, mapping in (
        (output.blocks_to_swap_out, message.blocks_to_swap_out),
        (output.blocks_to_swap_in, message.blocks_to_swap_in),
        (output.blocks_to_copy, message.blocks_to_copy),
    ):
        mapping.sources.extend(source for source, _ in pairs)
        mapping.destinations.extend(destination for _, destination in pairs)
    return message


MAX_POSITIONS = 1 << 18
"""Positions with log-probabilities of one sequence in an answer; each takes about 200 bytes."""


def _decode_logprobs(columns: pb.SampleLogprobs) -> list[TokenLogprobs]:
    """Split one sequence's columns by position. Raises ValueError for lengths that contradict each other."""
    width, positions = columns.width, len(columns.ranks)
    if positions > (MAX_POSITIONS if width else 0):
        raise ValueError(f"log-probabilities of sequence {columns.sequence_id} have {positions} positions of {width}")
    if not len(columns.token_ids) == len(columns.logprobs) == width * positions:
        raise ValueError(f"log-probabilities of sequence {columns.sequence_id} have columns of different lengths")
    token_ids, logprobs = list(columns.token_ids), list(columns.logprobs)
    return [
        TokenLogprobs(token_ids[i * width : (i + 1) * width], logprobs[i * width : (i + 1) * width], columns.ranks[i])
        for i in range(positions)
    ]


def decode_model_output(message: pb.ModelOutput) -> ModelOutput:
    """Raises ValueError if the lengths of the columns contradict each other."""
    # A sum of NaN or +inf shows useless results for the prompt.
    without = [columns.sequence_id for columns in message.prompt_logprobs if not sum(columns.logprobs) < math.inf]
    output = ModelOutput(
        message.step_id,
        list(message.token_ids),
        list(message.num_tokens),
        failed_sequence_ids=frozenset((*message.failed_sequence_ids, *without)),
        barred_sequence_ids=frozenset(message.barred_sequence_ids),
        num_draft_tokens=list(message.num_draft_tokens),
        num_draft_tokens_wanted=list(message.num_draft_tokens_wanted),
        vectors={vectors.sequence_id: vectors.data for vectors in message.vectors},
        failed_items=[EncoderItem(item.digest, item.part) for item in message.failed_items],
        prepared_items=[EncoderItem(item.digest, item.part) for item in message.prepared_items],
    )
    if not output.barred_sequence_ids <= output.failed_sequence_ids:
        raise ValueError("a sequence with no allowed token has not failed")
    if len(output.vectors) != len(message.vectors):
        raise ValueError("vectors of a sequence came twice")
    if output.num_tokens and sum(output.num_tokens) != len(output.token_ids):
        raise ValueError(f"{len(output.token_ids)} tokens do not divide into {len(output.num_tokens)} counts")
    for columns in message.logprobs:
        output.logprobs[columns.sequence_id] = _decode_logprobs(columns)
    for columns in message.prompt_logprobs:
        output.prompt_logprobs[columns.sequence_id] = _decode_logprobs(columns)
    return output
