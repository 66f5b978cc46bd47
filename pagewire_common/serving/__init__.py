"""Parts of a gRPC server."""
