"""Converts sounds to features for a model's encoder, and the model's tokens to transcripts."""
