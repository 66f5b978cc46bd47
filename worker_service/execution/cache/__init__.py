"""The memory of the KV cache, and the search for prefixes that sequences of a step share."""
