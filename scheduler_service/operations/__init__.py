"""What operators see and may change: AdminService, the state of the cluster, metrics. It counts nothing itself."""
