"""The start of a worker: chooses the device, opens the network, and measures memory and speed."""
