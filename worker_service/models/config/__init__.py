"""Helpers that read and check config.json. A key that is neither used nor known to be harmless is refused."""
