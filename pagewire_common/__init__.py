"""What both services are made of besides their purpose: settings, logs, and the life of a gRPC server.

Nothing here knows about requests, blocks or models.
"""
