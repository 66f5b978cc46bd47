"""Operators' view: AdminService, the state of the cluster, metrics. Counts come from `statistics`."""
