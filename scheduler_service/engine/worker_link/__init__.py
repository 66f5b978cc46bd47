"""The stream to one worker."""
