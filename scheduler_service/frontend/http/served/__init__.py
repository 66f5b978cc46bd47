"""Routes about the served model, its tokens and the server itself."""
