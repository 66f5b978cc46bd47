"""gRPC calls: their errors, unknown fields in requests, and slow readers."""
