"""Streams over HTTP that a client can resume: ids of events, and the repetition of what the client has received."""
