"""Computes the steps on the device: builds batches, and launches forward passes and CUDA graphs. The file
`running_step.py` decides which drafts are accepted.
"""
