"""Requests and their outputs: parameters, known tokens and computed tokens."""
