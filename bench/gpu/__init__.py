"""Brings a benchmark and its peer to a machine with a GPU and no network: see pack.py and serve_gpu.py."""
