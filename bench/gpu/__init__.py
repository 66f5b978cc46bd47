"""Runs a benchmark and its peer on a machine with a GPU and without a network: see pack.py and serve_gpu.py."""
