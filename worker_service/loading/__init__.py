"""Finds a model's folder by the model's name, and reads its weights. Checkpoints, GGUF files and tokenizer files are
checked before use.

The package `worker_service.models` defines what each tensor is used for.
"""
