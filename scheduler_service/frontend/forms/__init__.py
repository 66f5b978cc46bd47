"""Output forms: grammars, regular expressions and JSON schemas, rewritten where llguidance is not exact."""
