"""Loads a model by name or folder. Checkpoints, GGUF files and tokenizer files are checked before use.

The package `models` defines the meaning of the tensors.
"""
