"""Counts and durations, as plain numbers. `operations` presents them, as text and to operators."""
