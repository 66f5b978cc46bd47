"""The HTTP API of Ollama."""
