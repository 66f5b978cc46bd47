"""Converts between the core's types and messages of workers, front ends and recordings. Pure, without connections."""
