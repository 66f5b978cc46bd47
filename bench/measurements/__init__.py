"""Runs loads on several systems in turn, and draws tables and charts of the figures."""
