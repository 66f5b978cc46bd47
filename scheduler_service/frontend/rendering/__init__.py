"""Rendering of chats with the model's chat template, in processes with limits of time and memory."""
