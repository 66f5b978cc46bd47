"""Measures the overhead of a fleet, and its behaviour under failures and load. See __main__.py."""
