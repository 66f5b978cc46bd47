"""Services for operators: AdminService, the state of the cluster, metrics. The package `statistics` counts."""
