"""Inputs of attention: its options, a step's block tables, and 8-bit caches."""
