"""Measures fleets of several workers: their overhead, and their behaviour under failures and load. The file __main__.py
lists the measurements.
"""
