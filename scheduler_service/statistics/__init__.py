"""The server's statistics: counts and durations in plain numbers. The package `operations` converts them to text for
metrics and to messages for operators.
"""
