"""API keys: identify the caller of each call, and limit the usage of each key.

The engine reads the keys and counts usage. Front ends receive the keys' digests and identify callers.
"""
