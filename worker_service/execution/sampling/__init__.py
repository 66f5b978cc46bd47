"""Samples tokens from logits, and computes log-probabilities, pooled vectors and transcripts."""
