"""What calls of vLLM's engine protocol say beside their messages."""

LORA_NAME = "pagewire-lora-name-bin"
"""The adapter to apply, in UTF-8: the protocol has no field for it."""

CHAT_ID = "chatcmpl-"
"""What ids of chats begin with, as OpenAI's do: the gateway sends token ids alone, of chats and of texts."""
