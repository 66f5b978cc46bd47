"""A step on the device: moving blocks, the forward pass, sampling, and how much memory each has.

Models are left to `models`, their weights to `loading`, and the order of steps to `serving`.
"""
