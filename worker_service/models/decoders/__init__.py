"""Native decoders: their families, their layers, and heads that draft tokens."""
