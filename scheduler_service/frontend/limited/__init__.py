"""Processes with limits of CPU time and memory, for work that a client can make expensive."""
