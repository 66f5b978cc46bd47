"""What calls of vLLM's engine protocol say beside their messages."""

LORA_NAME = "pagewire-lora-name-bin"
"""The adapter to apply, in UTF-8: the protocol has no field for it."""
