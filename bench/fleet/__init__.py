"""Measures the overhead of a fleet, and its behaviour under failures and load. The file __main__.py describes the
measurements.
"""
