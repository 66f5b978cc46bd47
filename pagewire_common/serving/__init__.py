"""A gRPC server: its address, health, reflection and locks."""
