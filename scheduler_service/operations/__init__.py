"""Serves AdminService, the state of the cluster, and metrics to operators. The package `statistics` counts."""
