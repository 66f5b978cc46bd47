"""Readers of config.json: every key is obeyed, or refused by name."""
