"""Families that run in transformers' code, with our paged attention."""
