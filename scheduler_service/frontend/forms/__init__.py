"""Output forms: grammars, regular expressions and JSON schemas.

A JSON schema is rewritten where the library llguidance would allow invalid outputs.

`form_compiler` rewrites a JSON schema with the modules `schema_*`, each of which handles one kind of schema keyword.
"""
