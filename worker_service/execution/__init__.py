"""Computes steps on the device: moves of blocks, the forward pass and sampling. The package also measures and allocates
memory.

The package `models` defines the networks, `loading` reads weights, and `serving` determines the order of steps.
"""
