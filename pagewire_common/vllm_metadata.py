"""Metadata of calls of vLLM's engine protocol."""

LORA_NAME = "pagewire-lora-name-bin"
"""Metadata key of the adapter's name, in UTF-8: the protocol has no field for it."""

CHAT_ID = "chatcmpl-"
"""Prefix of the ids of chats, as in OpenAI's API: the gateway sends token ids of chats and of texts alike."""
