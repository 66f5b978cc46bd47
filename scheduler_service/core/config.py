"""The limits of a scheduler and the sizes of its worker, checked on construction."""

import enum
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_BLOCKS = 2**22
"""Blocks of one worker, for which the scheduler's tables fit in memory."""


MAX_LAYER_GROUPS = 8
"""Each has a block table for every sequence."""
MAX_GROUP_BLOCKS = 256
"""Blocks of a group of layers in `block_size` tokens."""
ANY_NUMBER = 1 << 62
"""Tokens that a block with states has room for."""


class PreemptionMode(enum.Enum):
    """The treatment of a preempted group's blocks.

    RECOMPUTE frees the blocks, and the group computes its tokens again. SWAP copies the blocks to host memory and back.
    AUTO chooses the cheaper by measured speeds. If host memory has no room, every mode recomputes.
    """

    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"


class PhaseRule(enum.Enum):
    """CHUNKED: prompts and decodes share a step. SEPARATE: a step has only prompts or only decodes."""

    CHUNKED = "chunked"
    SEPARATE = "separate"


class LayerGroup(NamedTuple):
    """Layers that need the same cache. Each group has a block table of its own. All groups' blocks have equally many
    bytes, and come from one pool."""

    block_size: int
    """Tokens of a block. 0: the layers keep states in place of keys and values, one block for each sequence."""
    window: int = 0
    """Tokens that each token attends to, including itself (0: all)."""
    chunked: bool = False
    """Whether tokens attend to chunks. A chunk has `window` tokens, and each token attends to its own chunk only."""

    @property
    def has_states(self) -> bool:
        return not self.block_size

    @property
    def kind(self) -> str:
        """For people: full, window W or chunk C (in tokens), or states."""
        if self.has_states:
            return "states"
        return f"{'chunk' if self.chunked else 'window'} {self.window}" if self.window else "full"

    @property
    def room(self) -> int:
        """Tokens that a block has room for."""
        return self.block_size or ANY_NUMBER

    def blocks_within_window(self, chunk: int) -> int:
        """Blocks that the window and a chunk touch together, at any offset in a block."""
        return (self.window - 1 + chunk - 2) // self.block_size + 2

    def first_needed(self, num_tokens: int) -> int:
        """The first block that the tokens after the first `num_tokens` attend to."""
        if not self.window:
            return 0
        first = num_tokens // self.window * self.window if self.chunked else max(0, num_tokens - self.window + 1)
        return first // self.block_size

    def released_at(self, block: int) -> int:
        """Tokens after which no token attends to a block of the table, with a window."""
        end = (block + 1) * self.block_size
        return -(-end // self.window) * self.window if self.chunked else end + self.window - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes and budgets. A value out of range raises ValueError with the field's name and its limit."""

    block_size: int
    """Tokens of a block or, with several groups of layers, of a whole number of each group's blocks."""
    num_device_blocks: int
    """Device blocks; 0 for an encoder model, which stores no keys and values and computes a prompt in one step."""
    max_num_batched_tokens: int
    """Tokens of a step."""
    max_num_seqs: int
    """Sequences of a step."""
    max_model_len: int
    """Tokens of one sequence, prompt and output together."""
    watermark: float = 0.01
    """Share of device blocks that admission leaves free, so that running sequences can grow."""
    num_host_blocks: int = 0
    max_prefill_chunk: int = 0
    """Tokens of the first long prompt in a step, while other sequences need the step's tokens (0: no limit). Each
    further long prompt computes at most half of the previous one's tokens. With windows, this is the limit also if no
    other sequence needs tokens."""
    max_loras: int = 1
    """Different adapters that the running groups use."""
    max_held_loras: int = 0
    """Adapters in the worker's host memory (0: all adapters)."""
    lora_copy_seconds: float = 0.0
    num_lookahead_slots: int = 0
    """Draft tokens that a sequence's blocks must have room for."""
    sliding_window: int = 0
    """Tokens that each token attends to in all layers, including itself (0: all). Blocks behind the window are
    freed."""
    layer_groups: tuple[LayerGroup, ...] = ()
    """The groups of layers, if there are several."""
    prefix_caching: bool = True
    phase_rule: PhaseRule = PhaseRule.CHUNKED
    delay_factor: float = 0.0
    """Multiple of the last prompt step's duration that a request waits with SEPARATE phases, so that prompts share a
    step."""
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE
    block_bytes: int = 0
    """Bytes of one block in a swap, for AUTO preemption."""
    swap_bytes_per_second: int = 0
    """Speed of copying blocks, for AUTO preemption. At 0, AUTO never swaps."""
    prefill_tokens_per_second: int = 0
    """Speed of computing a prompt, for AUTO preemption. At 0, any swap counts as faster."""
    max_num_encoder_tokens: int = 0
    """Tokens that the encoders of encoder-decoder models read in a step."""
    encoder_cache_size: int = 0
    """Tokens of images whose embeddings the worker keeps (0: prompts have no images)."""
    encoder_budget: int = 0
    """Tokens of images that a step encodes. A single image may exceed this number."""
    images_attend_both_ways: bool = False
    """True if an image's tokens attend to each other in both directions. A chunk then never ends inside an image."""
    prepares_images: bool = False
    """True if the worker encodes images in the background, and reports each of them."""
    max_step_bytes: int = 8 << 20
    """Bytes that describe new sequences in a step (see planning/step.py). A prompt of 131,072 tokens counts as 0.7 MB;
    the default takes about 15 ms to encode."""

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_model_len",
            "max_loras",
            "max_step_bytes",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in (
            "num_device_blocks",
            "num_host_blocks",
            "max_prefill_chunk",
            "max_held_loras",
            "num_lookahead_slots",
            "sliding_window",
            "block_bytes",
            "swap_bytes_per_second",
            "prefill_tokens_per_second",
            "max_num_encoder_tokens",
            "encoder_cache_size",
            "encoder_budget",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        self._check_layer_groups()
        if not 0 <= self.delay_factor < math.inf:
            raise ValueError(f"delay_factor is {self.delay_factor}; it must be at least 0 and finite")
        if self.delay_factor and self.phase_rule is PhaseRule.CHUNKED:
            raise ValueError(f"delay_factor is {self.delay_factor}; with chunked phases it must be 0")
        if not 0 <= self.lora_copy_seconds < math.inf:
            raise ValueError(f"lora_copy_seconds is {self.lora_copy_seconds}; it must be at least 0 and finite")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}; it must be in [0, 1)")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running sequence can gain a token in a step"
            )
        if self.is_encoder:
            if self.encoder_cache_size:
                raise ValueError(f"encoder_cache_size is {self.encoder_cache_size}; without blocks it must be 0")
            if self.max_num_batched_tokens < self.max_model_len:
                raise ValueError(
                    f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_model_len "
                    f"({self.max_model_len}), because an encoder computes a text whole"
                )
            return
        if self.max_num_batched_tokens < self.block_size:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least block_size "
                f"({self.block_size})"
            )
        if self.num_lookahead_slots >= self.num_device_blocks * self.block_size:
            raise ValueError(
                f"num_lookahead_slots is {self.num_lookahead_slots}; it must be less than the pool's "
                f"{self.num_device_blocks * self.block_size} tokens"
            )
        if self.max_sequence_tokens < 1:
            raise ValueError(
                f"num_device_blocks is {self.num_device_blocks}; no token fits into {len(self.groups)} groups of layers"
            )

    def _check_layer_groups(self) -> None:
        """Raise ValueError if the groups of layers contradict other fields."""
        if not self.layer_groups:
            return
        if self.images_attend_both_ways and self.has_states:
            raise ValueError("images_attend_both_ways excludes layer_groups with states")
        if self.sliding_window or self.max_num_encoder_tokens or self.is_encoder:
            raise ValueError("layer_groups excludes sliding_window, encoders, and encoder inputs")
        if len(self.layer_groups) > MAX_LAYER_GROUPS:
            raise ValueError(f"layer_groups has {len(self.layer_groups)} groups; the limit is {MAX_LAYER_GROUPS}")
        if [*self.layer_groups] != sorted(self.layer_groups, key=lambda group: (group.has_states, group.window > 0)):
            raise ValueError("layer_groups has another order than full, window, states")
        if self.has_states and self.num_lookahead_slots:
            raise ValueError(f"num_lookahead_slots is {self.num_lookahead_slots}; with states it must be 0")
        for group in self.layer_groups:
            if group.has_states:
                if group.window or group.chunked:
                    raise ValueError(f"layer_groups has states with a window of {group.window} tokens")
            elif group.chunked and not group.window:
                raise ValueError("layer_groups has chunks without a size (window)")
            elif self.block_size > MAX_GROUP_BLOCKS * group.block_size:
                raise ValueError(
                    f"layer_groups has a block of {group.block_size} tokens; block_size ({self.block_size}) may be at "
                    f"most {MAX_GROUP_BLOCKS} of them"
                )
            elif group.block_size < 0 or group.window < 0 or self.block_size % group.block_size:
                raise ValueError(
                    f"layer_groups has a block of {group.block_size} tokens and a window of {group.window}; block_size "
                    f"({self.block_size}) must be a multiple of each block, and a window at least 0"
                )

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The groups of layers, of which the first is a group without a window, if there is one."""
        return self.layer_groups or (LayerGroup(self.block_size, self.sliding_window),)

    @property
    def has_states(self) -> bool:
        return any(group.has_states for group in self.layer_groups)

    @property
    def has_windows(self) -> bool:
        return any(group.window for group in self.groups)

    @property
    def largest_chunk(self) -> int:
        """Tokens that a step computes of one sequence. With windows, a sequence holds blocks for these tokens and its
        windows together."""
        if not self.has_windows or not self.max_prefill_chunk:
            return self.max_num_batched_tokens
        # A chunk exceeds its limit up to the end of an image that is never cut.
        image = self.max_image_tokens if self.images_attend_both_ways else 0
        return min(self.max_prefill_chunk + image, self.max_num_batched_tokens)

    @property
    def is_encoder(self) -> bool:
        return not self.num_device_blocks

    @property
    def max_image_tokens(self) -> int:
        """Tokens of the largest image of a prompt. Beside an image that a step computes whole, every other running
        sequence can gain a token."""
        if not self.images_attend_both_ways:
            return self.encoder_cache_size
        return min(self.encoder_cache_size, self.max_num_batched_tokens - self.max_num_seqs + 1)

    @property
    def caches_prefixes(self) -> bool:
        return self.prefix_caching and not self.is_encoder

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of one sequence: the model's limit, or the pool's room if that is smaller."""
        if self.is_encoder:
            return self.max_model_len
        chunk = self.largest_chunk + self.num_lookahead_slots
        most = self.max_model_len + self.num_lookahead_slots
        return tokens_that_fit(self.groups, self.num_device_blocks, chunk, most) - self.num_lookahead_slots


def default_prefill_chunk(max_num_batched_tokens: int) -> int:
    """A quarter of a step's tokens. Of a half to a sixteenth, with a quarter short requests start soonest or second
    soonest (bench/results/scheduler.md)."""
    return -(-max_num_batched_tokens // 4)


def blocks_of_tokens(groups: Sequence[LayerGroup], num_tokens: int, chunk: int) -> int:
    """Blocks of one sequence of `num_tokens` tokens, computed in chunks of at most `chunk` tokens."""
    numbers = ((-(-num_tokens // group.room), group) for group in groups)
    return sum(min(all_, group.blocks_within_window(chunk)) if group.window else all_ for all_, group in numbers)


def tokens_that_fit(groups: Sequence[LayerGroup], num_blocks: int, chunk: int, most: int) -> int:
    """Tokens of the longest sequence, at most `most`, that `num_blocks` blocks have room for."""
    return bisect_right(range(1, most + 1), num_blocks, key=lambda n: blocks_of_tokens(groups, n, chunk))
