"""GGUF files: header, tensors, keys and tokenizer."""
