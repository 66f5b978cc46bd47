"""Networks that read images beside a native decoder."""
