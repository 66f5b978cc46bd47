"""Requests over HTTP that several tests send."""

from typing import Any

MODEL = "tiny-llama"
CHAT: list[Any] = [{"role": "user", "content": "hello"}]
WORDS: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 20}

PARAMETERS: list[dict[str, Any]] = [
    {"top_p": 0.5},
    {"top_k": 3},
    {"min_p": 0.3},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 2.0},
    {"ignore_eos": True},
    {"min_tokens": 20},
    {"stop_token_ids": list(range(60, 120))},
    {"regex": "[a-z]{5,9}!"},
]
