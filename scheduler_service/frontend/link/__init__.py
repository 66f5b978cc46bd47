"""A front end's side of its connection to the engine."""
