"""Decides which blocks hold the keys and values of each sequence; when a sequence gets any is planning's to decide."""
