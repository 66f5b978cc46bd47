"""KV cache: its memory, and prefixes that sequences of a step share."""
