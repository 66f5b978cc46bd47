"""Processes with limits of time and memory, for work that a client can make expensive."""
