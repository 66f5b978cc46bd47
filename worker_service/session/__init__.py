"""The state of one session: the scheduler's steps, and the sequences that live after them. It computes nothing."""
