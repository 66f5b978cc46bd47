"""Recordings of the default model under small pools, and the pictures of docs/how that are drawn from them."""
