"""Eager torch code for mixtures of experts, and for the quantisation of weights."""
