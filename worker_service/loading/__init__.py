"""From a name or a folder to tensors: checkpoints, GGUF files, tokenizer files, and what of them can be trusted.

What the tensors mean is left to `models`.
"""
