"""Reads the files of a model that both services use."""
