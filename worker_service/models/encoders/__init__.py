"""Encoders, and networks of an encoder and a decoder."""
