"""Serves the calls of clients, with one file for each kind of call."""
