"""Encoders, and encoder-decoders: networks that have an encoder and a decoder."""
