"""Reads quantised checkpoints in the layouts GPTQ, AWQ, compressed-tensors and FP8."""
