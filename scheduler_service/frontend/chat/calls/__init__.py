"""Readers of one tool call each: one module for each form in which model families write calls."""
