"""Native decoders: families, layers, and drafting heads."""
