"""Loads a model by name or folder: checkpoints, GGUF files and tokenizer files, all checked before use.

`models` knows the meaning of the tensors.
"""
