"""One worker on several devices: each of N processes, its ranks, holds a part of every weight, KV block and adapter.

The first rank serves gRPC. It repeats to the others every step, and what adapters come and go between steps. Every
rank computes the step on its own parts, and the ranks add up their results. A rank that dies takes the whole worker
with it.
"""

import os

LAUNCHER = "PAGEWIRE_LAUNCHER"
"""The variable by which `launcher` tells its ranks its process id."""


def is_rank() -> bool:
    """Whether this process was started as a rank, by `launcher` or by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ
