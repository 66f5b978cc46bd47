"""Computes a step on the device: block moves, the forward pass and sampling. It also measures and allocates the memory.

The package `models` defines the networks, `loading` reads weights, and `serving` orders the steps.
"""
