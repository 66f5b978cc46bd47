"""The state of one session: the steps that the scheduler sent, and the sequences that live after them. No computing."""
