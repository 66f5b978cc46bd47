"""Reads quantised checkpoints: GPTQ, AWQ, compressed-tensors and FP8."""
