"""Reads GGUF files: header, keys, tensors and tokenizer."""
