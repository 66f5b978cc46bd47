"""Measures the overhead of a fleet, and its behaviour under failures and load; see __main__.py."""
