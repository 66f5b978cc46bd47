"""The engine's side of its front ends: their processes, their port, and their streams."""
