"""The state of one session: the types of steps, and the live sequences."""
