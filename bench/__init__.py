"""Measurements. Every figure is printed beside a peer's, taken in the same run on the same machine."""
