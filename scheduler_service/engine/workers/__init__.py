"""What is known of the workers: their status and counts, and for how long none has taken requests."""
