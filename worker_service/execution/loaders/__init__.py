"""From an opened model to a runner with a cache: the loading steps of each kind of model."""
