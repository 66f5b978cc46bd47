"""The workers' state: status and counts of each, and how long none has taken requests."""
