"""Converts between the core's types and the messages of workers, front ends and recordings."""
