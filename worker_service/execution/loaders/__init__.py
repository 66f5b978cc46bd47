"""Turns an opened model into a runner with a cache. Each kind of model has its own loading steps."""
