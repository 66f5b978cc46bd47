"""The served model's limits: the first worker sets them, later workers must reach them."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pagewire.v1.engine_service_pb2 import ModelLimits
from pagewire_common.sampling import MAX_N
from pagewire_common.start_error import StartError
from scheduler_service.core import SchedulerConfig
from scheduler_service.core.config import MAX_LAYER_GROUPS, LayerGroup, default_prefill_chunk, tokens_that_fit
from scheduler_service.policies import policy_class
from scheduler_service.settings import MAX_BATCHED_TOKENS, MAX_SEQS, SchedulerSettings
from scheduler_service.wire.codec import WorkerInfo

LARGEST_STEPS_BEFORE_TIMEOUT = 10
"""Durations of the largest step, as measured at the worker's start; long contexts take several."""


def model_name(model: str) -> str:
    """The worker's name for --model: a folder's name, or a GGUF file's stem. Raises StartError for a missing path."""
    path = Path(os.path.expanduser(model))
    if path.exists():
        return path.stem if path.suffix == ".gguf" and path.is_file() else path.resolve().name
    if path.suffix == ".gguf" or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", model):
        raise StartError(f"there is no file or folder {path}")
    return model


def max_sequence_tokens(info: WorkerInfo) -> int:
    """Tokens of one sequence: at most the model's limit, and as many as the pool has room for."""
    if not info.num_device_blocks:
        return info.max_model_len
    most = info.max_model_len + info.num_speculative_tokens
    return _tokens_in(info, _num_own_blocks(info), most) - info.num_speculative_tokens


def _num_own_blocks(info: WorkerInfo) -> int:
    """Blocks for a request's own tokens, beside the longest encoder input."""
    return info.num_device_blocks - -(-info.max_encoder_len // info.block_size)


def _tokens_in(info: WorkerInfo, num_blocks: int, most: int) -> int:
    """Tokens of one sequence, at most `most`, that these blocks have room for."""
    groups = layer_groups(info) or (LayerGroup(info.block_size, info.sliding_window),)
    return tokens_that_fit(groups, num_blocks, info.max_num_batched_tokens + info.num_speculative_tokens, most)


def _pool_tokens(info: WorkerInfo, num_blocks: int) -> int:
    """Tokens that these blocks store in all layers, without freeing any behind a window. With states, one sequence at
    least has them, too."""
    groups = layer_groups(info)
    with_keys = [group for group in groups if not group.has_states]
    if groups and not with_keys:
        return num_blocks // len(groups) * info.max_model_len
    blocks_each = sum(info.block_size // group.block_size for group in with_keys) or 1
    return max(0, num_blocks - (len(groups) - len(with_keys))) // blocks_each * info.block_size


def layer_groups(info: WorkerInfo) -> tuple[LayerGroup, ...]:
    most = info.layer_groups[: MAX_LAYER_GROUPS + 1]  # more are refused, and not copied before
    return tuple(LayerGroup(group.block_size, group.window, group.chunked) for group in most)


def max_num_batched_tokens(settings: SchedulerSettings, info: WorkerInfo) -> int:
    return min(settings.max_num_batched_tokens or MAX_BATCHED_TOKENS, info.max_num_batched_tokens)


def max_num_seqs(settings: SchedulerSettings, info: WorkerInfo) -> int:
    return min(settings.max_num_seqs or MAX_SEQS, info.max_num_seqs, max_num_batched_tokens(settings, info))


def settings_above(settings: SchedulerSettings, info: WorkerInfo) -> dict[str, tuple[int, int]]:
    """Flags above this worker's limits: the flag's value and the limit."""
    pairs = {
        "--max-num-batched-tokens": (settings.max_num_batched_tokens, info.max_num_batched_tokens),
        "--max-num-seqs": (settings.max_num_seqs, info.max_num_seqs),
    }
    return {flag: (ours, theirs) for flag, (ours, theirs) in pairs.items() if ours is not None and ours > theirs}


def model_limits(settings: SchedulerSettings, info: WorkerInfo) -> ModelLimits:
    context_length = max_sequence_tokens(info)
    return ModelLimits(
        name=settings.served_model_name or info.model_id,
        fingerprint=info.model_fingerprint,
        dtype=info.dtype,
        context_length=context_length,
        block_size=info.block_size,
        # Half of the first worker's pool: later workers may have less free memory.
        pool_tokens=max(context_length, _pool_tokens(info, _num_own_blocks(info) // 2)),
        vocabulary_size=info.vocabulary_size,
        max_num_seqs=max_num_seqs(settings, info),
        has_priorities=policy_class(settings.scheduling_policy).reads_priority,
        has_forms="forms" in info.features,
        num_lookahead_slots=info.num_speculative_tokens,
        generates=info.num_device_blocks > 0,
        embedding_size=info.embedding_size,
        pooling_type=info.pooling_type,  # type: ignore[arg-type]
        normalizes=info.normalizes,
        num_labels=info.num_labels,
        max_num_batched_tokens=max_num_batched_tokens(settings, info),
        max_encoder_len=info.max_encoder_len,
        feature_bytes=info.feature_bytes,
        undeclared_keys=settings.undeclared_keys,
        prompt_embeds_size=info.prompt_embeds_size if settings.enable_prompt_embeds else 0,
        encoder_cache_size=_max_image_tokens(settings, info),
    )


def _max_image_tokens(settings: SchedulerSettings, info: WorkerInfo) -> int:
    """See `SchedulerConfig.max_image_tokens`."""
    if not info.images_attend_both_ways:
        return info.encoder_cache_size
    most = max_num_batched_tokens(settings, info) - max_num_seqs(settings, info) + 1
    return min(info.encoder_cache_size, most)


def check_limits(
    limits: ModelLimits, groups: Sequence[LayerGroup], settings: SchedulerSettings, info: WorkerInfo
) -> None:
    """Raise ValueError for another model, another cache, or limits below the served model's. `groups`: the first
    worker's groups of layers."""
    for name, ours, theirs in (
        ("model fingerprint", limits.fingerprint, info.model_fingerprint),
        ("dtype", limits.dtype, info.dtype),
        ("size of a vector", limits.embedding_size, info.embedding_size),
        ("number of classes", limits.num_labels, info.num_labels),
        ("longest input of an encoder", limits.max_encoder_len, info.max_encoder_len),
        ("size of a sound's features", limits.feature_bytes, info.feature_bytes),
    ):
        if ours != theirs:
            raise ValueError(f"the worker's {name} is {theirs}; that of earlier workers is {ours}")
    _check_blocks(groups, limits.block_size, info)
    if limits.prompt_embeds_size not in (0, info.prompt_embeds_size):
        raise ValueError(
            f"the worker's size of prompt_embeds is {info.prompt_embeds_size}; that of earlier workers is "
            f"{limits.prompt_embeds_size}"
        )
    if info.encoder_cache_size < limits.encoder_cache_size:
        raise ValueError(
            f"the worker's encoder cache has {info.encoder_cache_size} tokens; requests were promised "
            f"{limits.encoder_cache_size}; start it like the first worker, with --encoder-cache-size"
        )
    if limits.has_forms and "forms" not in info.features:
        raise ValueError(
            "the worker supports no forms, but earlier workers do; start them with --no-forms, or this one with --forms"
        )
    if info.num_speculative_tokens > limits.num_lookahead_slots:
        raise ValueError(
            f"the worker makes {info.num_speculative_tokens} drafts, but requests were promised room for "
            f"{limits.num_lookahead_slots}; start it like the first worker, or that one with --speculative-config"
        )
    promises = [("largest step", min(limits.max_num_seqs, MAX_N), max_num_seqs(settings, info))]
    # In `pagewire serve` the page may ask for a small pool. Requests that do not fit it end with an error.
    if settings.learn_pipe is None:
        pool_tokens = max(max_sequence_tokens(info), _pool_tokens(info, _num_own_blocks(info)))
        promises += [
            ("longest sequence", limits.context_length, max_sequence_tokens(info)),
            ("pool", limits.pool_tokens, pool_tokens),
        ]
    for name, promised, offered in promises:
        if offered < promised:
            raise ValueError(f"the worker's {name} is {offered}; requests were promised {promised}")


def _check_blocks(ours: Sequence[LayerGroup], block_size: int, info: WorkerInfo) -> None:
    """Raise ValueError if a worker has other blocks than the first worker."""
    theirs = layer_groups(info)
    if [*theirs] != [*ours]:
        if theirs and ours:
            hint = "it needs the same --block-size, --max-model-len, --max-num-batched-tokens and --kv-cache-dtype"
        else:
            hint = "start the workers that have several groups with --disable-hybrid-kv-cache-manager"
        raise ValueError(
            f"the worker's groups of layers are: {_in_words(theirs, info.block_size)}; earlier workers have: "
            f"{_in_words(ours, block_size)}; {hint}"
        )
    if info.block_size != block_size:
        raise ValueError(
            f"the worker's block size is {info.block_size}; that of earlier workers is {block_size}; start it with "
            f"--block-size {block_size}"
        )


def _in_words(groups: Sequence[LayerGroup], block_size: int) -> str:
    """The kinds of layers, with the tokens of a block."""
    if not groups:
        return f"one for all ({block_size} tokens a block)"
    kinds = Counter(f"{one.kind} ({one.block_size} tokens a block)" if one.block_size else one.kind for one in groups)
    return ", ".join(f"{number} x {kind}" if number > 1 else kind for kind, number in kinds.items())


def num_places(info: WorkerInfo) -> int:
    """Adapters that a worker can hold: --max-cpu-loras if reported, else those of one step."""
    return (info.max_cpu_loras or info.max_loras) if info.max_loras else 0


def step_timeout(settings: SchedulerSettings, config: SchedulerConfig) -> float:
    """Seconds of a step after which the worker counts as lost."""
    if not config.prefill_tokens_per_second:
        return settings.step_timeout
    largest_step = config.max_num_batched_tokens / config.prefill_tokens_per_second
    return max(settings.step_timeout, LARGEST_STEPS_BEFORE_TIMEOUT * largest_step)


def scheduler_config(
    settings: SchedulerSettings, info: WorkerInfo, limits: ModelLimits | None = None
) -> SchedulerConfig:
    """Raises ValueError if the core cannot schedule the worker. The first worker's step `limits` apply to all."""
    num_batched_tokens, num_seqs = max_num_batched_tokens(settings, info), max_num_seqs(settings, info)
    if limits is not None:
        num_batched_tokens = min(num_batched_tokens, limits.max_num_batched_tokens)
        num_seqs = min(num_seqs, limits.max_num_seqs)
    if (ours := settings.max_num_batched_tokens) is not None and ours < info.block_size and info.num_device_blocks:
        raise ValueError(
            f"--max-num-batched-tokens of this scheduler is {ours}; it must be at least {info.block_size}, the tokens "
            "of the worker's blocks, which follow from its --block-size and the model's groups of layers"
        )
    threshold = settings.long_prefill_token_threshold
    config = SchedulerConfig(
        block_size=info.block_size,
        num_device_blocks=info.num_device_blocks,
        max_num_batched_tokens=num_batched_tokens,
        max_prefill_chunk=default_prefill_chunk(num_batched_tokens) if threshold is None else threshold,
        max_num_seqs=num_seqs,
        max_model_len=info.max_model_len,
        watermark=settings.watermark,
        num_host_blocks=info.num_host_blocks,
        sliding_window=info.sliding_window,
        layer_groups=layer_groups(info),
        prefix_caching=settings.prefix_caching,
        phase_rule=settings.phase_rule,
        delay_factor=settings.delay_factor,
        preemption_mode=settings.preemption_mode,
        block_bytes=info.block_bytes,
        swap_bytes_per_second=info.swap_bytes_per_second,
        prefill_tokens_per_second=info.prefill_tokens_per_second,
        num_lookahead_slots=info.num_speculative_tokens,
        max_loras=max(1, info.max_loras),
        max_held_loras=num_places(info),
        lora_copy_seconds=info.lora_copy_seconds,
        max_num_encoder_tokens=info.max_num_encoder_tokens,
        encoder_cache_size=info.encoder_cache_size,
        encoder_budget=info.encoder_budget,
        prepares_images="images-ahead" in info.features,
        images_attend_both_ways=info.images_attend_both_ways,
    )
    if info.max_encoder_len and max_sequence_tokens(info) < 2:
        raise ValueError(f"the worker has {info.num_device_blocks} blocks; one request's encoder input fills them all")
    return config
