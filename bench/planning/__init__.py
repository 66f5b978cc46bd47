"""Benchmarks of the scheduler without workers."""
