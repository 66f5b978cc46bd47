"""Draft tokens from a draft model or from heads of the target."""
