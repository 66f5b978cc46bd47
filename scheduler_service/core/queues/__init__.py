"""Decides in which order requests wait, and which running group makes room; which worker takes them is placement's."""
