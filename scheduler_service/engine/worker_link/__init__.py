"""The connection and the stream of steps to one worker."""
