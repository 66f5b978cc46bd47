"""A loop for each worker: it opens a session, sends steps and takes answers in, and opens the next session."""
