"""Decides what one worker computes in each step, and takes its answers in; order, blocks and placement are others'."""
