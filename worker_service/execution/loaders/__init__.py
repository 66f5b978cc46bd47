"""From an opened model to a runner with a cache: the steps of each kind of model."""
