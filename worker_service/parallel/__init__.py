"""One worker on several devices. The worker is N processes, called ranks. Each rank stores a part of every weight, KV
block and adapter.

The first rank serves gRPC. The first rank broadcasts every step to the other ranks, and adapters between steps. Every
rank computes the step on its own parts, and the ranks all-reduce their results. If a rank dies, the whole worker ends.
"""

import os

LAUNCHER = "PAGEWIRE_LAUNCHER"
"""The environment variable that gives the launcher's process id to its ranks."""


def is_rank() -> bool:
    """Whether this process was started as a rank, by pagewire's launcher or by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ
