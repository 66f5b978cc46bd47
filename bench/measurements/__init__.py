"""Runs loads on several systems in turn, and makes tables and charts of the figures."""
