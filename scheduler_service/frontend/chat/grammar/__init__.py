"""Grammars of tool calls in Lark's syntax for llguidance: one module for each form of calls."""
