"""The fleet: which workers there are, and the step loop of each."""
