"""Converts text to tokens and tokens to text: tokenizers, chat templates, stop strings."""
