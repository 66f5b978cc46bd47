"""Each worker's loop: open a session, send steps, process answers, and open the next session."""
