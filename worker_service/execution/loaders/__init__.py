"""Loads a model and creates the runner that computes its steps. Each kind of model has a loader of its own."""
