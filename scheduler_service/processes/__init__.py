"""The processes of a scheduler: the keeper starts and restarts an engine and its front ends."""
