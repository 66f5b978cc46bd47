"""Channels to other services, and TLS."""
