"""Serves the gRPC service WorkerService, manages sessions, and determines the order of steps."""
