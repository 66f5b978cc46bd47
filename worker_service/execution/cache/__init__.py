"""The memory of the KV cache, and the search for prefixes that several sequences of a step share."""
