"""Measurements of how a worker computes: weights, adapters, drafts, and exactness."""
