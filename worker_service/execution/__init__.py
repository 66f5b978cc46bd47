"""Computes a step on the device: block moves, the forward pass and sampling. The package also measures and allocates
memory.

The package `models` defines the networks, `loading` reads weights, and `serving` orders the steps.
"""
