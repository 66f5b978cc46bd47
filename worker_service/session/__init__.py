"""The state of one session: the scheduler's steps, and its live sequences. This package computes nothing."""
