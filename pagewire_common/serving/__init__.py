"""Parts of a gRPC server: its address, health, reflection and locks."""
