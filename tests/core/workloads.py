"""Random schedulers and requests: small pools and short prompts, in which rare events are soon seen."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from math import lcm
from random import Random
from typing import Any

from slow_images import SlowImage

from scheduler_service.core import (
    EncoderInput,
    EncoderItem,
    ImagePart,
    PhaseRule,
    PreemptionMode,
    PromptItem,
    SamplingParams,
    SchedulerConfig,
    SequenceGroup,
)
from scheduler_service.core.config import LayerGroup


@dataclass(frozen=True)
class Request:
    """`num_shared` of the prompt's tokens are a common beginning."""

    number: int
    num_tokens: int
    num_shared: int
    sampling: SamplingParams
    root: bytes
    priority: int
    tenant: str
    adapter_id: str
    encoder: tuple[int, ...] = ()
    """Tokens of the encoder."""
    images: tuple[SlowImage, ...] = ()

    @property
    def name(self) -> str:
        return str(self.number)

    @property
    def prompt(self) -> list[int]:
        num_shared = min(self.num_shared, self.num_tokens)
        prompt = [
            *range(num_shared),
            *range(1000 * (self.number + 1), 1000 * (self.number + 1) + self.num_tokens - num_shared),
        ]
        for image in self.images:
            prompt[image.start : image.stop] = [IMAGE_TOKEN] * image.num_tokens
        return prompt

    def group(self, arrived_at: float = 0.0) -> SequenceGroup:
        return SequenceGroup(
            self.name,
            self.prompt,
            self.sampling,
            self.root,
            priority=self.priority,
            tenant=self.tenant,
            adapter_id=self.adapter_id,
            encoder_input=(
                EncoderInput(num_tokens=len(self.encoder), token_ids=self.encoder) if self.encoder else None
            ),
            arrived_at=arrived_at,
            items=tuple(map(_item, self.images)),
        )


def _item(image: SlowImage) -> PromptItem:
    (digest, part), data = image.name, bytes(IMAGE_BYTES)
    width = 1 + [*IMAGES].index(digest)
    return PromptItem(digest, image.start, image.num_tokens, len(data), data, ImagePart(width, 48, part))


def random_request(rng: Random, number: int) -> Request:
    max_tokens, beam_width = rng.choice([1, 2, 5, 8, 12, 16]), rng.choice([0, 0, 0, 0, 0, 2, 3])
    return Request(
        number,
        rng.choice([1, 2, 4, 5, 7, 8, 9, 11, 14, 20]),
        rng.choice([0, 4, 8, 24]),
        SamplingParams(
            max_tokens=max_tokens,
            n=1 if beam_width else rng.choice([1, 1, 1, 2, 3]),
            min_tokens=min(rng.randrange(4), max_tokens),
            eos_token_ids=frozenset(range(rng.choice([0, 0, 1, 4]))),
            beam_width=beam_width,
        ),
        rng.choice([b"", b"", b"another salt"]),
        rng.randrange(3),
        rng.choice("xyz"),
        rng.choice(["", "", "", "a", "b", "c"]),
    )


def with_encoder(rng: Random, request: Request) -> Request:
    """Many share an input, some have none, and some exceed every worker."""
    encoder = tuple(range(rng.choice([0, 1, 3, 6, 6, 6, MAX_ENCODED, MAX_ENCODED + 1])))
    if rng.random() < 0.7:
        return replace(request, encoder=encoder, root=b"", adapter_id="")
    return replace(request, encoder=encoder)


def with_images(rng: Random, request: Request) -> Request:
    """The request with a few images, one after another or apart. A prompt often ends with an image."""
    images: list[SlowImage] = []
    start = rng.randrange(4)
    while start < request.num_tokens:
        digest = rng.choice([*IMAGES])
        for part, num_tokens in enumerate(IMAGES[digest]):
            if start + num_tokens <= request.num_tokens:
                images.append(SlowImage(EncoderItem(digest, part), start, start + num_tokens))
                start += num_tokens
        start += rng.choice([0, 0, 1, 2, 5])
    num_tokens = images[-1].stop if images and rng.random() < 0.4 else request.num_tokens
    return replace(request, images=tuple(images), num_tokens=num_tokens)


def sharing(request: Request) -> Request:
    """The request with a common prompt of several blocks."""
    num_tokens = 12 + request.num_tokens
    return replace(request, num_tokens=num_tokens, num_shared=num_tokens - request.number % 3, root=b"", adapter_id="")


def with_shared_prefixes(config: SchedulerConfig, seed: int) -> SchedulerConfig:
    """A worker on which such requests wait for each other, with steps of a second."""
    rng = Random(f"{seed} shared")
    return replace(
        config,
        num_device_blocks=config.num_device_blocks + rng.choice([0, 8, 16]),
        max_num_batched_tokens=max(config.max_num_seqs, config.block_size, rng.randint(4, 12)),
        max_model_len=60,
        prefix_caching=True,
        sliding_window=0,
        prefill_tokens_per_second=rng.choice([1, 4, 16]),
    )


MAX_ENCODED = 9
IMAGES = {b"a": (3,), b"b": (1,), b"c": (5,), b"d": (2, 2), b"e": (9,), b"f": (1, 3, 1)}
"""Digests, and the tokens of each part."""
IMAGE_BYTES = 30
IMAGE_TOKEN = 999


def with_encoder_cache(config: SchedulerConfig, seed: int) -> SchedulerConfig:
    """A worker that keeps few images, for some of which it has no room at all."""
    rng = Random(f"{seed} images")
    config = replace(config, encoder_cache_size=rng.choice([4, 5, 9, 12, 40]), encoder_budget=rng.choice([0, 3, 6, 20]))
    config = replace(config, prepares_images=rng.random() < 0.5)
    return replace(config, images_attend_both_ways=not config.has_states and rng.random() < 0.5)


def with_few_adapters(config: SchedulerConfig, seed: int) -> SchedulerConfig:
    """A worker that must fetch adapters."""
    return replace(config, max_held_loras=Random(f"{seed} held").choice([0, 0, 1, 2, 3]))


def with_layer_groups(config: SchedulerConfig, seed: int) -> SchedulerConfig:
    """A worker whose layers are in one to four groups, which read no encoder's input if there are several. In a third
    of all workers, one or two groups have states, and perhaps no others."""
    rng = Random(f"{seed} layers")
    if rng.random() < 0.3:
        return config
    sizes = rng.choice([[1], [1, 1], [1, 2], [2, 1], [3, 2], [1, 3, 6], [2, 2, 1, 4]])
    windows = [rng.choice([0, 0, 1, 4, 9]) for _ in sizes]
    chunked = [window > 0 and rng.random() < 0.4 for window in windows]
    groups = sorted(map(LayerGroup, sizes, windows, chunked), key=lambda group: group.window > 0)
    if states := rng.choice([0, 0, 0, 0, 1, 2]) * [LayerGroup(0)]:
        groups = [*groups[: rng.randrange(3)], *states]
    block_size = lcm(*(group.block_size for group in groups if group.block_size))
    return replace(
        config,
        block_size=block_size,
        layer_groups=tuple(groups),
        sliding_window=0,
        max_num_encoder_tokens=0,
        num_device_blocks=config.num_device_blocks * len(groups),
        num_host_blocks=config.num_host_blocks * len(groups),
        max_num_batched_tokens=max(config.max_num_batched_tokens, block_size),
        num_lookahead_slots=0 if states else min(config.num_lookahead_slots, config.num_device_blocks - 1),
    )


def random_config(rng: Random, num_device_blocks: SequenceOf[int]) -> SchedulerConfig:
    block_size, max_num_seqs = rng.choice([1, 2, 2, 3, 4]), rng.choice([1, 2, 3, 4, 6, 8, 10])
    num_blocks, phase_rule = rng.choice(num_device_blocks), rng.choice([*PhaseRule])
    sizes: dict[str, Any] = {
        "block_size": block_size,
        "num_device_blocks": num_blocks,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(block_size, max_num_seqs + rng.randrange(20)),
        "max_prefill_chunk": rng.choice([0, 1, 2, 3, 5, 8]),
        "max_model_len": rng.choice([20, 60]),
        "watermark": rng.choice([0.0, 0.1, 0.3]),
        "num_host_blocks": rng.choice([0, 4, 8, 14, 20]),
        "max_loras": rng.randint(1, 2),
        "num_lookahead_slots": min(rng.choice([0, 0, 1, 3]), num_blocks * block_size - 1),
        "sliding_window": rng.choice([0, 0, 0, 0, 1, 4, 9]),
        "prefix_caching": rng.choice([True, True, False]),
        "phase_rule": phase_rule,
        "delay_factor": rng.choice([0.0, 2.0]) if phase_rule is PhaseRule.SEPARATE else 0.0,
        "preemption_mode": rng.choice([*PreemptionMode, PreemptionMode.SWAP]),
        "block_bytes": 1000,
        "swap_bytes_per_second": rng.choice([0, 100_000]),
        "prefill_tokens_per_second": rng.choice([0, 49 * block_size, 51 * block_size]),
        "max_num_encoder_tokens": MAX_ENCODED,
        "max_step_bytes": rng.choice([1, 300, 700, 2000, 8 << 20, 8 << 20, 8 << 20]),
    }
    return SchedulerConfig(**sizes)
