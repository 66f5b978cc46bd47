"""Records every call into the core, and replays the file: the core is deterministic."""
