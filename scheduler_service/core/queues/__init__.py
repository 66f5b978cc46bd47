"""The order of waiting requests, and the running group that is preempted, by policy."""
