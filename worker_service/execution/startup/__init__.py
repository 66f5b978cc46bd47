"""Steps before a worker's first step: the device, the network, its capacity and its speed."""
