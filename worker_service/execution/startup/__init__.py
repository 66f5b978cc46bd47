"""The start of a worker: device, network, memory and speed."""
