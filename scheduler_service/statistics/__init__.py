"""Counts and durations, in plain numbers. What is made of them, as text or for operators, is left to `operations`."""
