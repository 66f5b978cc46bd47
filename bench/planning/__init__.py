"""Measurements of the scheduler alone."""
