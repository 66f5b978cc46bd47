"""One worker on several devices: each of N processes, its ranks, holds a part of every weight, KV block and adapter.

The first rank serves gRPC. It broadcasts every step, and adapters between steps, to the others. Every rank computes the
step on its own parts, and the ranks all-reduce their results. If a rank dies, the whole worker ends.
"""

import os

LAUNCHER = "PAGEWIRE_LAUNCHER"
"""The environment variable that gives `launcher`'s process id to its ranks."""


def is_rank() -> bool:
    """Whether this process was started as a rank, by `launcher` or by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ
