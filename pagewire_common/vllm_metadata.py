"""Metadata keys and id prefixes for calls of vLLM's engine protocol."""

LORA_NAME = "pagewire-lora-name-bin"
"""Metadata key of the adapter's name, in UTF-8. vLLM's protocol has no field for this name."""

CHAT_ID = "chatcmpl-"
"""Prefix of the ids of chats, as in OpenAI's API. The gateway sends token ids for chats and for texts; the prefix
distinguishes them.
"""
