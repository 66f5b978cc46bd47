"""Readers of the config.json of native families."""
