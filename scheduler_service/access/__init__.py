"""API keys: which caller a call is of, and how much each key may ask for.

The engine reads the keys and counts what they use; front ends know their digests alone, and tell callers apart.
"""
