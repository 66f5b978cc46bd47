"""Decodes steps, and checks them against the worker's limits, without the session's sequences. Afterwards, numbers of
blocks and token ids are safe as memory indices."""

from array import array
from collections.abc import Collection
from ctypes import c_float
from typing import Any

from pagewire.v1 import scheduler_output_pb2 as pb
from pagewire.v1 import sequence_group_pb2 as group_pb
from pagewire_common.sampling import MAX_BIAS, NUMBERS
from worker_service.errors import InvalidStepError
from worker_service.serving.codec.blocks import decode_block_ids, decode_mapping, decode_table_update, decode_tables
from worker_service.serving.codec.items import decode_encoder_items, decode_items
from worker_service.session.step import (
    TOKENS,
    Fork,
    Limits,
    NewSequence,
    PoolingParams,
    PoolingType,
    SamplingParams,
    SchedulerOutput,
    TranscriptParams,
)

TOKEN_BYTES = array(TOKENS).itemsize
_PREFIX = "POOLING_TYPE_"


def _in_32_bits(value: float) -> float:
    """Round to float32, in which the device computes. A number that is too large becomes infinite."""
    return c_float(value).value


_BOUNDS = {
    name: number.bounds
    if number.kind is int
    else number.bounds._replace(low=_in_32_bits(number.bounds.low), high=_in_32_bits(number.bounds.high))
    for name, number in NUMBERS.items()
}
"""Bounds of each sampling parameter in float32, where 5e-324 is 0. Values outside would make logits infinite."""


def decode_scheduler_output(message: pb.SchedulerOutput, limits: Limits) -> SchedulerOutput:
    """Raises InvalidStepError with the invalid field and the limit."""
    sequence_ids = tuple(message.sequence_ids)
    if len(set(sequence_ids)) != len(sequence_ids):
        raise InvalidStepError("sequence_ids: a sequence is scheduled twice")
    # In an encoder-decoder, the encoder input of a sequence counts as a further sequence.
    most_sequences = limits.max_num_seqs * (2 if limits.max_encoder_len else 1)
    if len(sequence_ids) > most_sequences:
        raise InvalidStepError(f"sequence_ids: {len(sequence_ids)} sequences; the limit is {most_sequences}")
    num_scheduled_tokens = tuple(message.num_scheduled_tokens) or (1,) * len(sequence_ids)
    samples = tuple(message.samples) or (True,) * len(sequence_ids)
    num_draft_tokens = tuple(message.num_draft_tokens)
    for name, column in (
        ("num_scheduled_tokens", num_scheduled_tokens),
        ("samples", samples),
        ("num_draft_tokens", num_draft_tokens or samples),
    ):
        if len(column) != len(sequence_ids):
            raise InvalidStepError(f"{name}: {len(column)} entries for {len(sequence_ids)} sequence_ids")
    if (most := max(num_draft_tokens, default=0)) > limits.num_speculative_tokens:
        raise InvalidStepError(
            f"num_draft_tokens: room for {most} drafts; this worker verifies up to {limits.num_speculative_tokens}"
        )
    if 0 in num_scheduled_tokens:
        raise InvalidStepError("num_scheduled_tokens: an entry is 0")
    # The session checks both limits separately, because only the session knows which sequences are encoder inputs.
    most = limits.max_num_batched_tokens + limits.max_num_encoder_tokens
    if sum(num_scheduled_tokens) > most:
        raise InvalidStepError(f"num_scheduled_tokens: {sum(num_scheduled_tokens)} tokens; the limit is {most}")
    device, host = limits.num_device_blocks, limits.num_host_blocks
    return SchedulerOutput(
        epoch=message.epoch,
        step_id=message.step_id,
        new_sequences=tuple(_new_sequence(new, limits) for new in message.new_sequences),
        sequence_ids=sequence_ids,
        num_scheduled_tokens=num_scheduled_tokens,
        samples=samples,
        block_table_updates=tuple(decode_table_update(update, limits) for update in message.block_table_updates),
        forks=tuple(
            Fork(
                fork.parent_sequence_id,
                fork.child_sequence_id,
                fork.num_tokens,
                fork.num_computed_tokens,
                tables[0],
                fork.index,
                array(TOKENS, _token_ids("forks: token_ids", fork.token_ids, limits)),
                tables[1:],
            )
            for fork, tables in ((fork, decode_tables(fork, limits)) for fork in message.forks)
        ),
        blocks_to_swap_out=decode_mapping("blocks_to_swap_out", message.blocks_to_swap_out, device, host),
        blocks_to_swap_in=decode_mapping("blocks_to_swap_in", message.blocks_to_swap_in, host, device),
        blocks_to_copy=decode_mapping("blocks_to_copy", message.blocks_to_copy, device, device),
        finished=tuple(message.finished),
        preempted=tuple(message.preempted),
        dropped_items=tuple(message.dropped_items),
        num_draft_tokens=num_draft_tokens,
        items_to_encode=decode_encoder_items(message.items_to_encode),
        dropped_embeddings=decode_encoder_items(message.dropped_embeddings),
        items_ahead=decode_encoder_items(message.images_ahead),
    )


def _new_sequence(message: pb.NewSequence, limits: Limits) -> NewSequence:
    where = f"new_sequences: sequence {message.sequence_id}"
    if message.adapter_id and not limits.max_loras:
        raise InvalidStepError(f"{where}: adapter_id: this worker takes no adapters")
    if message.HasField("encoder_input"):
        return _encoder_input(where, message, limits)
    num_tokens = len(message.token_ids)
    if not 1 <= message.num_prompt_tokens <= num_tokens:
        raise InvalidStepError(f"{where}: {message.num_prompt_tokens} prompt tokens of {num_tokens}")
    block_ids, *further_tables = decode_tables(message, limits)
    return NewSequence(
        message.sequence_id,
        array(TOKENS, _token_ids(f"{where}: token_ids", message.token_ids, limits)),
        message.num_prompt_tokens,
        message.num_computed_tokens,
        block_ids,
        _sampling(f"{where}: sampling", message, limits),
        message.adapter_id,
        encoder_id=message.encoder_sequence_id,
        further_tables=tuple(further_tables),
        items=decode_items(where, message, limits),
    )


def _encoder_input(where: str, message: pb.NewSequence, limits: Limits) -> NewSequence:
    given = message.encoder_input
    least = limits.max_encoder_len if limits.feature_bytes else 1
    if not least <= given.num_tokens <= limits.max_encoder_len:
        raise InvalidStepError(f"{where}: {given.num_tokens} tokens for an encoder that reads {limits.max_encoder_len}")
    if len(message.block_ids) != -(-given.num_tokens // limits.block_size):
        raise InvalidStepError(f"{where}: {len(message.block_ids)} blocks for {given.num_tokens} tokens")
    token_ids = array(TOKENS, _token_ids(f"{where}: encoder_input", given.token_ids, limits))
    if message.num_computed_tokens not in (0, given.num_tokens):
        raise InvalidStepError(f"{where}: an encoder input is computed whole or not at all")
    if message.num_computed_tokens or limits.feature_bytes:
        token_ids = array(TOKENS, bytes(TOKEN_BYTES * given.num_tokens))
    if len(token_ids) != given.num_tokens:
        raise InvalidStepError(f"{where}: {len(token_ids)} token ids for {given.num_tokens} tokens")
    if len(given.features) not in (0, limits.feature_bytes):
        raise InvalidStepError(f"{where}: {len(given.features)} bytes of features instead of {limits.feature_bytes}")
    return NewSequence(
        message.sequence_id,
        token_ids,
        given.num_tokens,
        message.num_computed_tokens,
        decode_block_ids(message.block_ids, limits),
        SamplingParams(),
        message.adapter_id,
        is_encoder=True,
        features=given.features,
    )


def _sampling(where: str, new: pb.NewSequence, limits: Limits) -> SamplingParams:
    message, pooling = new.sampling, None
    if message.HasField("pooling"):
        pooling = _pooling(f"{where}: pooling", message.pooling, limits, new.num_prompt_tokens)
    numbers: dict[str, Any] = {}
    for name, bounds in _BOUNDS.items():
        if message.HasField(name):
            value = getattr(message, name)
            numbers[name] = value if isinstance(value, int) else _in_32_bits(value)
            if not bounds.hold(numbers[name]):
                raise InvalidStepError(f"{where}: {name} is {value:g}; it must be {bounds}")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(message, name) > limits.vocabulary_size:
            raise InvalidStepError(
                f"{where}: {name} is {getattr(message, name)}; the vocabulary has {limits.vocabulary_size} tokens"
            )
    if not all(-MAX_BIAS <= bias <= MAX_BIAS for bias in message.logit_bias.values()):
        raise InvalidStepError(f"{where}: a logit_bias is not from {-MAX_BIAS} to {MAX_BIAS}")
    if not all(word.token_ids for word in message.bad_words):
        raise InvalidStepError(f"{where}: a bad word has no tokens")
    return SamplingParams(
        **numbers,
        seed=message.seed,
        index=new.index,
        min_tokens=message.min_tokens,
        eos_token_ids=tuple(_token_ids(f"{where}: eos_token_ids", message.eos_token_ids, limits)),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        logit_bias=tuple(
            (token, message.logit_bias[token])
            for token in _token_ids(f"{where}: logit_bias", message.logit_bias.keys(), limits)
        ),
        allowed_token_ids=array(TOKENS, _token_ids(f"{where}: allowed_token_ids", message.allowed_token_ids, limits)),
        bad_words=tuple(tuple(_token_ids(f"{where}: bad_words", word.token_ids, limits)) for word in message.bad_words),
        form=message.form,
        form_owner=new.form_owner,
        pooling=pooling,
        transcript=_transcript(f"{where}: transcript", message.transcript, limits)
        if message.HasField("transcript")
        else None,
        is_beam=message.beam_width > 0,
    )


def _pooling(where: str, message: group_pb.PoolingParams, limits: Limits, num_prompt_tokens: int) -> PoolingParams:
    if message.type == group_pb.POOLING_TYPE_UNSPECIFIED or message.type not in group_pb.PoolingType.values():
        raise InvalidStepError(f"{where}: type {message.type} is not known")
    kind = PoolingType[group_pb.PoolingType.Name(message.type).removeprefix(_PREFIX)]
    if kind is PoolingType.ALIGNMENT:
        most = num_prompt_tokens if limits.aligns else 0
        if most and not 1 <= message.num_sound_tokens <= limits.max_encoder_len:
            raise InvalidStepError(
                f"{where}: num_sound_tokens is {message.num_sound_tokens}; the encoder has {limits.max_encoder_len}"
            )
    else:
        most = limits.num_labels if kind is PoolingType.SCORE else limits.embedding_size
    if not 1 <= message.dimensions <= most:
        raise InvalidStepError(f"{where}: dimensions is {message.dimensions}; this worker's vectors have {most}")
    return PoolingParams(
        type=kind,
        dimensions=message.dimensions,
        normalize=message.normalize,
        half=message.half,
        num_first_tokens=message.num_first_tokens,
        num_sound_tokens=message.num_sound_tokens,
    )


def _transcript(where: str, params: group_pb.TranscriptParams, limits: Limits) -> TranscriptParams:
    _token_ids(where, [params.first_timestamp, params.num_text_tokens], limits)
    return TranscriptParams(
        params.first_timestamp,
        params.max_initial,
        params.num_text_tokens,
        tuple(_token_ids(where, params.suppressed, limits)),
        tuple(_token_ids(where, params.begin_suppressed, limits)),
    )


def _token_ids(where: str, token_ids: Collection[int], limits: Limits) -> Collection[int]:
    if token_ids and max(token_ids) >= limits.vocabulary_size:
        raise InvalidStepError(
            f"{where}: token {max(token_ids)} is beyond the vocabulary of {limits.vocabulary_size} tokens"
        )
    return token_ids
