"""What a fleet costs and what it bears; see __main__.py."""
