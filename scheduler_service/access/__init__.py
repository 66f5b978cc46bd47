"""API keys identify the caller of each call, and limit the usage of each caller.

The engine reads the API keys and counts their usage. Front ends receive the digests of the keys and identify callers.
"""
