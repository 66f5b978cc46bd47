"""Native model implementations: a file a family, and what families share."""
