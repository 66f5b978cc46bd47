"""A scheduler's limits and the sizes of its worker, checked once."""

import enum
import math
from dataclasses import dataclass

MAX_BLOCKS = 2**22
"""Blocks of one worker: many times what the largest devices hold, and as many as the scheduler has memory to manage."""


class PreemptionMode(enum.Enum):
    """The fate of a preempted group's blocks.

    RECOMPUTE frees its blocks and computes its tokens again; SWAP copies its blocks to host memory and back; AUTO takes
    the cheaper way by the worker's measured speeds. If host memory has no room, every mode recomputes.
    """

    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"


class PhaseRule(enum.Enum):
    """Whether prompts and decodes share a step (CHUNKED), or a step is all of one or all of the other (SEPARATE)."""

    CHUNKED = "chunked"
    SEPARATE = "separate"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes and budgets; raises ValueError with the field and its bound."""

    block_size: int
    """Tokens of a block."""
    num_device_blocks: int
    """0 for a worker with an encoder, which keeps no keys and values: a prompt is computed whole in one step, and uses
    nothing but the step's token budget."""
    max_num_batched_tokens: int
    """Tokens of a step."""
    max_num_seqs: int
    """Sequences of a step."""
    max_model_len: int
    """Tokens of one sequence, prompt and output together."""
    watermark: float = 0.01
    """The share of device blocks that admission leaves free, so that running sequences can grow before one has to be
    preempted."""
    num_host_blocks: int = 0
    """Blocks in host memory, for groups that are swapped out."""
    max_prefill_chunk: int = 0
    """Tokens that the first long prompt computes in a step at most, while other sequences want a share of the step
    (0: no bound). Each further prompt that is as long computes at most half as many as the one before it, so that long
    prompts do not hold up requests behind them. Tokens of the step that are then left go to the long prompts."""
    max_loras: int = 1
    """Adapters of the groups that run at a time."""
    max_held_loras: int = 0
    """Adapters that the worker holds in host memory (0: all adapters)."""
    lora_copy_seconds: float = 0.0
    """Seconds that copying an adapter to the device takes."""
    num_lookahead_slots: int = 0
    """Tokens that every sequence has room for past the tokens it computes next."""
    sliding_window: int = 0
    """Tokens that each token attends to, itself included (0: all). Blocks behind the window are freed, and prefixes are
    not cached, because their first blocks would be missing."""
    prefix_caching: bool = True
    """Whether blocks are found by the tokens in them."""
    phase_rule: PhaseRule = PhaseRule.CHUNKED
    """Whether prompts and decodes share steps."""
    delay_factor: float = 0.0
    """Admission with SEPARATE phases waits until a request has waited for so many times the last prompt step, so that
    prompts batch up; 0 admits at once. CHUNKED phases take no delay: prompts share the steps that the decodes take
    anyway, so that waiting would gain them nothing."""
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE
    """AUTO compares copying a group's blocks out and back in with computing its tokens again. Blocks that the
    other pool already has are not copied; blocks that other groups hold on the device are neither copied back nor
    computed again."""
    block_bytes: int = 0
    """Bytes to copy of each block, for AUTO."""
    swap_bytes_per_second: int = 0
    """Speed of copying, for AUTO; 0 counts as never finishing."""
    prefill_tokens_per_second: int = 0
    """Speed of computing, for AUTO; 0 counts as never finishing."""
    max_num_encoder_tokens: int = 0
    """Tokens that encoders of encoder-decoder models read in a step (0 for other models)."""
    max_step_bytes: int = 8 << 20
    """Bytes in which a step describes sequences that are new to the worker: see planning/step.py. A prompt of 131,072
    tokens counts 0.7 MB; encoding the default takes about 15 ms."""

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
        """Whether there are no keys and values to keep."""
        return not self.num_device_blocks

    @property
    def caches_prefixes(self) -> bool:
        """Whether prompts can find blocks of earlier ones: not with a window in every layer, nor without blocks."""
        return self.prefix_caching and not (self.sliding_window or self.is_encoder)

    @property
    def max_blocks_per_sequence(self) -> int:
        """The most blocks that one sequence ever holds: the whole pool, or window and chunk, wherever they begin."""
        if not self.sliding_window:
            return self.num_device_blocks
        chunk = self.max_num_batched_tokens + self.num_lookahead_slots
        return blocks_within_window(self.sliding_window, chunk, self.block_size)

    @property
    def max_sequence_tokens(self) -> int:
        """The most tokens one sequence can reach: the model's limit, or what the pool has room for."""
        if self.is_encoder or (self.sliding_window and self.max_blocks_per_sequence <= self.num_device_blocks):
            return self.max_model_len
        return min(self.max_model_len, self.num_device_blocks * self.block_size - self.num_lookahead_slots)


def default_prefill_chunk(max_num_batched_tokens: int) -> int:
    """A quarter of a step: of the halves down to a sixteenth it held up the fewest (bench/results/scheduler.md)."""
    return -(-max_num_batched_tokens // 4)


def blocks_within_window(sliding_window: int, chunk: int, block_size: int) -> int:
    """The most blocks that a window and the tokens computed at once touch, wherever in a block they begin."""
    return (sliding_window - 1 + chunk - 2) // block_size + 2
