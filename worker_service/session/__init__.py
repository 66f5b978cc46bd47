"""The state of one session: the types of the scheduler's steps, and the live sequences. This package computes no
tokens.
"""
