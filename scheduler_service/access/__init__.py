"""API keys: which caller makes a call, and the quota of each key.

The engine reads the keys and counts their use. Front ends have only the keys' digests, and identify callers.
"""
