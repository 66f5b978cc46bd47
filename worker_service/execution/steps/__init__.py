"""One step on the device: batches, forward passes, recorded graphs."""
