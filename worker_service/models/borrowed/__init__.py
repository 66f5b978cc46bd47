"""Networks that run in transformers' code, with this project's paged attention."""
