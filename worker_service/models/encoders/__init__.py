"""Encoders, and encoders with decoders."""
