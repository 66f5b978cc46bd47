"""What a worker builds and measures before its first step."""
