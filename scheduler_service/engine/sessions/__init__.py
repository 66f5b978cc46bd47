"""A loop for each worker: it opens a session, sends steps, processes answers, and opens the next session."""
