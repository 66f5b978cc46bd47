"""What a scheduler must know of its worker and its limits, checked once."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes and budgets; raises ValueError with the field and its bound.

    `max_num_batched_tokens` and `max_num_seqs` bound one step; `max_model_len` bounds prompt and output of one
    sequence; `watermark` is the share of device blocks that admission leaves free so that running sequences can
    grow before anyone has to be preempted.
    """

    block_size: int
    num_device_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    watermark: float = 0.01

    def __post_init__(self) -> None:
        for name in ("block_size", "num_device_blocks", "max_num_batched_tokens", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}; it must be in [0, 1)")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running sequence can gain a token in a step"
            )

    @property
    def max_sequence_tokens(self) -> int:
        """The most tokens one sequence can reach: the model's limit, or the whole pool."""
        return min(self.max_model_len, self.num_device_blocks * self.block_size)
