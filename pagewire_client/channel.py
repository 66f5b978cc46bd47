"""How clients connect."""

OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 64 << 20),
    # A server that comes back, perhaps at another address of the same name, is to be found within a second or two.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # what one attempt to connect may take
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)
