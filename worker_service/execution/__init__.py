"""A step on the device: block moves, the forward pass, sampling, and the memory of each.

`models` has the models, `loading` their weights, `serving` the order of steps.
"""
