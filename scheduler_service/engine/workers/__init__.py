"""The state of the workers: status and counts of each, and for how long none has taken requests."""
