"""What attention reads: its options, a step's block tables, and caches in 8 bits."""
