"""Services for operators: AdminService, the state of the cluster, metrics. The package `statistics` has the counts."""
