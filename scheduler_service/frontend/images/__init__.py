"""Checks the images of requests."""
