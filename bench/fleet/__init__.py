"""Measures fleets of several workers. __main__.py lists the measurements."""
