"""gRPC calls: errors, unknown fields, slow readers."""
