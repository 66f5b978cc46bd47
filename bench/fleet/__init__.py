"""Measures what a fleet costs and how it takes failures and load; see __main__.py."""
