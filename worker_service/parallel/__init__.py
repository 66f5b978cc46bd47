"""Runs one worker on several devices, as N processes that are called ranks. Each rank stores a part of every weight, KV
cache block and adapter.

The first rank serves gRPC, broadcasts every step to the other ranks, and broadcasts adapters between steps. Every rank
computes each step with its own parts of the weights and blocks, and the ranks all-reduce their results. If a rank dies,
the launcher ends all ranks of the worker.
"""

import os

LAUNCHER = "PAGEWIRE_LAUNCHER"
"""The environment variable in which ranks find the process id of their launcher."""


def is_rank() -> bool:
    """Whether this process was started as a rank of a worker, by pagewire's launcher or by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ
