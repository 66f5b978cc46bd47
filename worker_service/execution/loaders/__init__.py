"""Loaders of models. Each kind of model has its own."""
