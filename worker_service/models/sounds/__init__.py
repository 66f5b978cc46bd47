"""Networks that read sounds beside a native decoder."""
