"""Computes one step on the device: batches, forward passes and CUDA graphs. `running_step` decides which drafts are
accepted.
"""
