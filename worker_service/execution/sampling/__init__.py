"""Samples tokens from logits: edits of logits, output forms, choice of tokens, log-probabilities, pooling and
transcripts.
"""
