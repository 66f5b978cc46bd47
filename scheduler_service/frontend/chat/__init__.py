"""Chats: how a model family writes reasoning and tool calls, and the conversion of a model's text to events."""
