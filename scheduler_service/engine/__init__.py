"""The fleet, in one process: requests in flight, each worker's next step, and the messages to front ends."""
