"""Output forms: grammars, regular expressions and JSON schemas. A schema is rewritten where llguidance is not exact.

`form_compiler` rewrites a JSON schema with the files `schema_*`. Each `schema_*` file handles one kind of keyword.
"""
