"""Measurements of what clients see."""
