"""Decides from losses and seconds whether a request is what workers are lost to, and gives it steps of its own."""
