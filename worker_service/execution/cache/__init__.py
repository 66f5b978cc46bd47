"""The KV cache's memory, and the search for shared prefixes."""
