"""Eager torch for mixtures of experts and for quantisation."""
