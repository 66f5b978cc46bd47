"""Finds a model's folder by name, checks its files and reads its weights."""
