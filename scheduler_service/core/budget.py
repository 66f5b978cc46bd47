"""What one step may still take."""


class SchedulingBudget:
    """Tokens and sequences (never groups) left in a step; made anew for every step.

    Whatever was taken for a sequence that is then preempted is given back in exactly that amount.
    """

    __slots__ = ("num_seqs", "num_tokens")

    def __init__(self, token_budget: int, max_num_seqs: int) -> None:
        self.num_tokens = token_budget
        self.num_seqs = max_num_seqs

    def take(self, *, num_tokens: int = 0, num_seqs: int = 0) -> None:
        """Spend; raises ValueError rather than going below zero."""
        if num_tokens > self.num_tokens or num_seqs > self.num_seqs:
            raise ValueError(
                f"budget exceeded: {num_tokens} of {self.num_tokens} tokens, {num_seqs} of {self.num_seqs} sequences"
            )
        self.num_tokens -= num_tokens
        self.num_seqs -= num_seqs

    def give_back(self, *, num_tokens: int = 0, num_seqs: int = 0) -> None:
        self.num_tokens += num_tokens
        self.num_seqs += num_seqs
