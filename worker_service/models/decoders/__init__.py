"""Decoders of our own: families, layers in order, heads that draft."""
