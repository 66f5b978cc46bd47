"""API keys identify the caller of each call, and limit the usage of each caller."""
