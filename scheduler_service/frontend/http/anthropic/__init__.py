"""The HTTP API of Anthropic."""
