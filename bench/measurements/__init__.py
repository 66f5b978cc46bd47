"""Loads on several systems in turn, and the tables and charts of what was measured."""
