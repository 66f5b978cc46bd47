"""Samples tokens from logits: edits, forms, sampling, log-probabilities, pooling and transcripts."""
