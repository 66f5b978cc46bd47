"""A loop for each worker: the loop opens a session, sends steps, processes answers, and then opens the next session."""
