"""Helpers that read and check a model's config.json. Every key must be used, or be known to have no effect; any other
key is refused, and the error names the key."""
