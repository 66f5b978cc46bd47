"""Decides from losses and seconds alone whether a request is what workers are lost to; planning sees to its steps."""
