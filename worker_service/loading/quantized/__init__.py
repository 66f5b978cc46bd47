"""Quantised checkpoints: packed integers, groups of compressed-tensors, FP8."""
