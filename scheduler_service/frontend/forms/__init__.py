"""Output forms: grammars, regular expressions and JSON schemas."""
