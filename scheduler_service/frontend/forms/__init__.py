"""Output forms: grammars, regular expressions and JSON schemas, rewritten where llguidance is not exact.

`form_compiler` rewrites a JSON schema by the files `schema_*`, each for one kind of keyword.
"""
