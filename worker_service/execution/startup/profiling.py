"""A trial forward pass over placeholder tokens, which measures memory and speed before the worker serves.

On a GPU, the pass has the largest size of a step, with short contexts, and its peak memory limits the KV cache. On a
CPU, the pass is small and measures speed only."""

from array import array
from typing import TYPE_CHECKING

import torch

from worker_service.execution.cache.cache_engine import CacheEngine, CacheShape
from worker_service.execution.steps.encoder_decoder_runner import EncoderDecoderRunner
from worker_service.execution.steps.model_runner import ModelRunner, Runner
from worker_service.models.causal_model import CausalModel
from worker_service.session.sequence_state import ScheduledChunk, SequenceState
from worker_service.session.step import TOKENS, PoolingParams, PoolingType, SamplingParams, SchedulerOutput

if TYPE_CHECKING:
    from worker_service.models.encoders.encoder_decoder import EncoderDecoder  # this import loads transformers

_CPU_TOKENS = 256
"""On two cores, the default model computes 256 tokens in 0.2 s and 2,048 tokens in 2 s."""


def measure_prefill(
    model: CausalModel,
    shape: CacheShape,
    device: torch.device,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> int:
    """Tokens a second of prefill. On a GPU, the step has `max_num_batched_tokens` tokens and `max_num_seqs` sequences.

    Afterwards, torch's peak of GPU memory includes the largest step. Raises torch's OutOfMemoryError."""
    num_tokens = max_num_batched_tokens if device.type == "cuda" else min(max_num_batched_tokens, _CPU_TOKENS)
    num_seqs = min(max_num_seqs, num_tokens) if device.type == "cuda" else 1
    length, num_longer = divmod(num_tokens, num_seqs)
    lengths = [length + 1] * num_longer + [length] * (num_seqs - num_longer)
    longest = min(max(lengths), model.config.max_model_len)
    block_size, *further_sizes = [group.block_size for group in shape.groups] or [shape.block_size]
    sizes = [size for size in (block_size, *further_sizes) if size]
    blocks = range(-(-longest // min(sizes, default=longest)))
    # All sequences use the same blocks, because the results do not matter.
    chunks = [
        ScheduledChunk(
            SequenceState(
                sequence_id=number,
                token_ids=array(TOKENS, bytes(8 * min(length, longest))),
                num_prompt_tokens=1,
                num_computed_tokens=0,
                block_ids=array(TOKENS, blocks),
                sampling=SamplingParams(temperature=1.0, top_p=0.9),
                further_tables=tuple(array(TOKENS, blocks) for _ in further_sizes),
            ),
            start=0,
            stop=min(length, longest),
            samples=True,
        )
        for number, length in enumerate(lengths)
    ]
    return _speed(ModelRunner(model, CacheEngine(shape, len(blocks), 0, device)), chunks)


def measure_encoder_decoder(
    model: "EncoderDecoder", shape: CacheShape, device: torch.device, max_num_batched_tokens: int
) -> int:
    """Tokens a second of encoder and decoder together, see `measure_prefill`.

    The step has one encoder input, because encoders compute one at a time. An audio model's input has the maximum
    length."""
    config, is_cuda = model.config, device.type == "cuda"
    is_whole = is_cuda or config.feature_bytes > 0
    num_encoder_tokens = config.max_encoder_len if is_whole else min(config.max_encoder_len, _CPU_TOKENS)
    most = max_num_batched_tokens if is_cuda else min(max_num_batched_tokens, _CPU_TOKENS)
    num_tokens = min(config.max_model_len, most)
    encoder = SequenceState(
        sequence_id=0,
        token_ids=array(TOKENS, bytes(8 * num_encoder_tokens)),
        num_prompt_tokens=num_encoder_tokens,
        num_computed_tokens=0,
        block_ids=array(TOKENS, range(-(-num_encoder_tokens // shape.block_size))),
        sampling=SamplingParams(),
        is_encoder=True,
    )
    first = len(encoder.block_ids)
    decoders = [
        SequenceState(
            sequence_id=1 + number,
            token_ids=array(TOKENS, bytes(8 * num_tokens)),
            num_prompt_tokens=1,
            num_computed_tokens=0,
            block_ids=array(TOKENS, range(first, first - (-num_tokens // shape.block_size))),
            sampling=SamplingParams(temperature=1.0, top_p=0.9),
            encoder=encoder,
        )
        for number in range(most // num_tokens if is_cuda else 1)
    ]
    chunks = [ScheduledChunk(encoder, 0, num_encoder_tokens, False)]
    chunks += [ScheduledChunk(decoder, 0, num_tokens, True) for decoder in decoders]
    cache = CacheEngine(shape, first + len(decoders[0].block_ids), 0, device)
    encoder.features = bytes(config.feature_bytes)
    return _speed(EncoderDecoderRunner(model, cache), chunks)


def measure_encoder(runner: Runner, max_model_len: int, max_num_batched_tokens: int, num_labels: int = 0) -> int:
    """Tokens a second of an encoder, with texts of the maximum length. On a GPU, the step has the largest size."""
    pooling = PoolingParams(type=PoolingType.SCORE if num_labels else PoolingType.CLS, dimensions=max(1, num_labels))
    num_tokens = max_num_batched_tokens if runner.device.type == "cuda" else _CPU_TOKENS
    length = min(max_model_len, num_tokens)
    states = [
        SequenceState(
            sequence_id=number,
            token_ids=array(TOKENS, bytes(8 * length)),
            num_prompt_tokens=length,
            num_computed_tokens=0,
            block_ids=array(TOKENS),
            sampling=SamplingParams(pooling=pooling),
        )
        for number in range(num_tokens // length)
    ]
    return _speed(runner, [ScheduledChunk(state, start=0, stop=length, samples=True) for state in states])


def _speed(runner: Runner, chunks: list[ScheduledChunk]) -> int:
    nothing_to_move = SchedulerOutput(epoch=0, step_id=0)
    # The first pass also loads libraries and chooses kernels.
    runner.execute(nothing_to_move, chunks)
    timing = runner.execute(nothing_to_move, chunks).timing
    return round(sum(chunk.stop for chunk in chunks) * 1e6 / max(timing.forward_us, 1))
