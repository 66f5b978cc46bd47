"""Linear layers of the networks: one for all tokens, and one for each expert of a mixture."""
