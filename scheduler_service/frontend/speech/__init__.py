"""Sounds: features for a model's encoder, and transcripts from its tokens. It handles no requests."""
