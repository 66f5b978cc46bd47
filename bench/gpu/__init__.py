"""Compares pagewire with vLLM on a machine that has a GPU but no network: see pack.py and serve_gpu.py."""
