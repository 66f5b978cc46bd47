"""The scheduler's connection to one worker, and the stream of steps on it."""
