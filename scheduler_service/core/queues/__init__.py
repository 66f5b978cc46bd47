"""Decides in which order requests wait, and which running group makes room; which worker takes them is placement's.

Each policy is a class in a file of its own. `fair_queue` counts the shares of tenants.
"""
