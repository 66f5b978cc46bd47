"""The limits of a scheduler and the sizes of its worker, checked on construction."""

import enum
import math
from dataclasses import dataclass

MAX_BLOCKS = 2**22
"""Maximum number of blocks of one worker, for which the scheduler's tables fit in memory. The largest devices have room
for far fewer blocks."""


class PreemptionMode(enum.Enum):
    """The treatment of a preempted group's blocks.

    RECOMPUTE frees the blocks, and the group computes its tokens again. SWAP copies the blocks to host memory and back.
    AUTO chooses the cheaper of RECOMPUTE and SWAP by the worker's measured speeds. If host memory has no room, every
    mode recomputes.
    """

    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"


class PhaseRule(enum.Enum):
    """Whether prompts and decodes share a step (CHUNKED), or each step has only prompts or only decodes (SEPARATE)."""

    CHUNKED = "chunked"
    SEPARATE = "separate"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes and budgets of a scheduler. If a value is out of range, raises ValueError with the field's name and its
    limit."""

    block_size: int
    """Tokens of a block."""
    num_device_blocks: int
    """Number of device blocks. A worker whose model is only an encoder stores no keys and values, and has 0 blocks. A
    worker without blocks computes each prompt in one step, within the step's token budget."""
    max_num_batched_tokens: int
    """Maximum tokens of a step."""
    max_num_seqs: int
    """Maximum sequences of a step."""
    max_model_len: int
    """Maximum tokens of one sequence, prompt and output together."""
    watermark: float = 0.01
    """Share of device blocks that admission leaves free, so that running sequences can grow for a while without
    preemption."""
    num_host_blocks: int = 0
    """Number of blocks in host memory, for swapped groups."""
    max_prefill_chunk: int = 0
    """Maximum tokens that the first long prompt of a step computes, while other sequences need tokens of this step (0:
    no limit). Each further long prompt computes at most half as many tokens as the long prompt before, so that long
    prompts do not delay later requests. Tokens of a step that no other sequence needs go to the long prompts."""
    max_loras: int = 1
    """Maximum number of different adapters that the running groups use."""
    max_held_loras: int = 0
    """Maximum number of adapters in the worker's host memory (0: all adapters)."""
    lora_copy_seconds: float = 0.0
    """Seconds to copy an adapter to the device."""
    num_lookahead_slots: int = 0
    """Number of draft tokens that a sequence's blocks must have room for, after the tokens that the sequence computes
    next."""
    sliding_window: int = 0
    """Number of tokens that each token attends to, including itself (0: all tokens before it). Blocks whose tokens have
    all left the sliding window are freed. With a sliding window, prefixes are not cached, because their first blocks
    would be missing."""
    prefix_caching: bool = True
    """Whether prompts can find cached blocks by the tokens in them."""
    phase_rule: PhaseRule = PhaseRule.CHUNKED
    """Whether prompts and decodes share steps."""
    delay_factor: float = 0.0
    """Delay of admission with SEPARATE phases (0: no delay). A request waits for `delay_factor` times the duration of
    the last prompt step, so that several prompts share a step. CHUNKED phases allow no delay, because prompts share the
    steps of decodes and waiting would gain nothing."""
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE
    """Treatment of a preempted group's blocks. AUTO compares the time to copy the blocks out and back in with the time
    to compute the tokens again. A swap does not copy blocks that the target memory already has. When a group resumes,
    blocks that other groups hold on the device are neither copied back nor computed again."""
    block_bytes: int = 0
    """Bytes that a swap copies for each block; only AUTO preemption needs this value."""
    swap_bytes_per_second: int = 0
    """Speed of copying blocks between device and host, for AUTO preemption. At speed 0, AUTO never swaps."""
    prefill_tokens_per_second: int = 0
    """Speed of computing a prompt, for AUTO preemption. At speed 0, AUTO treats a recompute as slower than any swap."""
    max_num_encoder_tokens: int = 0
    """Maximum tokens that the encoders of encoder-decoder models read in a step (0 for other models)."""
    max_step_bytes: int = 8 << 20
    """Maximum bytes that describe new sequences in a step; see planning/step.py. A prompt of 131,072 tokens counts as
    0.7 MB. Encoding the default number of bytes takes about 15 ms."""

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
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
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

    @property
    def is_encoder(self) -> bool:
        """Whether the worker's model is only an encoder, so that the worker stores no keys and values."""
        return not self.num_device_blocks

    @property
    def caches_prefixes(self) -> bool:
        """Whether a prompt can use cached blocks of earlier prompts. The result is False if all layers have a sliding
        window, or if the worker has no blocks."""
        return self.prefix_caching and not (self.sliding_window or self.is_encoder)

    @property
    def max_blocks_per_sequence(self) -> int:
        """The maximum number of blocks of one sequence. This is the whole pool or, with a sliding window, the blocks
        that the window and a chunk can touch."""
        if not self.sliding_window:
            return self.num_device_blocks
        chunk = self.max_num_batched_tokens + self.num_lookahead_slots
        return blocks_within_window(self.sliding_window, chunk, self.block_size)

    @property
    def max_sequence_tokens(self) -> int:
        """The maximum number of tokens of one sequence: the model's limit, or the pool's room if that is smaller."""
        if self.is_encoder or (self.sliding_window and self.max_blocks_per_sequence <= self.num_device_blocks):
            return self.max_model_len
        return min(self.max_model_len, self.num_device_blocks * self.block_size - self.num_lookahead_slots)


def default_prefill_chunk(max_num_batched_tokens: int) -> int:
    """The default of `max_prefill_chunk`: a quarter of a step's tokens. Limits from a half to a sixteenth of a step
    were measured. With a quarter of a step, short requests start soonest or second soonest
    (bench/results/scheduler.md)."""
    return -(-max_num_batched_tokens // 4)


def blocks_within_window(sliding_window: int, chunk: int, block_size: int) -> int:
    """The maximum number of blocks that a sliding window and a chunk of tokens together touch, at any offset in a
    block."""
    return (sliding_window - 1 + chunk - 2) // block_size + 2
