"""One step on the device: batches, forward passes, CUDA graphs, and the drafts that a step accepts (`running_step`)."""
