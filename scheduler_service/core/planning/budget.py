"""What one step may still take."""


class SchedulingBudget:
    """Tokens, sequences (never groups) and bytes left in a step, and tokens of encoders; made anew for every step.

    Whatever was taken for a sequence that is then preempted is given back in exactly that amount. Bytes may be
    overdrawn once: what is told with the last of them is told whole.
    """

    __slots__ = ("num_bytes", "num_encoder_tokens", "num_seqs", "num_tokens")

    def __init__(self, token_budget: int, max_num_seqs: int, num_bytes: int, num_encoder_tokens: int = 0) -> None:
        self.num_tokens = token_budget
        self.num_seqs = max_num_seqs
        self.num_bytes = num_bytes
        self.num_encoder_tokens = num_encoder_tokens

    @property
    def is_spent(self) -> bool:
        """Whether no further sequence can be taken into the step."""
        return self.num_tokens <= 0 or self.num_bytes <= 0

    def take(self, *, num_tokens: int = 0, num_seqs: int = 0, num_bytes: int = 0, num_encoder_tokens: int = 0) -> None:
        """Spend; raises ValueError rather than having tokens or sequences go below zero."""
        if num_tokens > self.num_tokens or num_seqs > self.num_seqs or num_encoder_tokens > self.num_encoder_tokens:
            raise ValueError(
                f"budget exceeded: {num_tokens} of {self.num_tokens} tokens, {num_seqs} of {self.num_seqs} sequences, "
                f"{num_encoder_tokens} of {self.num_encoder_tokens} tokens of encoders"
            )
        self.num_tokens -= num_tokens
        self.num_seqs -= num_seqs
        self.num_bytes -= num_bytes
        self.num_encoder_tokens -= num_encoder_tokens

    def give_back(
        self, *, num_tokens: int = 0, num_seqs: int = 0, num_bytes: int = 0, num_encoder_tokens: int = 0
    ) -> None:
        self.num_tokens += num_tokens
        self.num_seqs += num_seqs
        self.num_bytes += num_bytes
        self.num_encoder_tokens += num_encoder_tokens
