"""The stream from a front end to the engine."""
