"""Readers of config.json. A key is used, is known to have no effect, or is refused by name."""
