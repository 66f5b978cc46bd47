"""Counts and durations in plain numbers. `operations` converts the numbers to text for metrics and to messages for
operators.
"""
