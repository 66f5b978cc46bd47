"""Capacity planning without a GPU: the real scheduler core, simulated workers, and a virtual clock."""
