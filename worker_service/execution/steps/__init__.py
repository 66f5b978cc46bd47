"""Computes steps: builds batches, and launches forward passes and CUDA graphs."""
