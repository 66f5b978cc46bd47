"""Runs one worker on several devices, as processes called ranks. Each rank stores a part of every weight, block and
adapter.

The first rank serves gRPC and broadcasts steps and adapters. Every rank computes each step with its parts, and
all-reduces combine the results. If a rank dies, the launcher ends all ranks."""

import os

LAUNCHER = "PAGEWIRE_LAUNCHER"
"""The environment variable with the process id of a rank's launcher."""


def is_rank() -> bool:
    """Whether pagewire's launcher or torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ
