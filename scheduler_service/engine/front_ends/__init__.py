"""The engine's handling of front ends: their processes, their shared port, and their streams."""
