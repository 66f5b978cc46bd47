"""Files of a checkpoint, read within limits."""
