"""instructor: typed answers by each of its modes, and in parts."""

from typing import Any

import instructor
from checks import MODEL, URL, USER, Place, run
from instructor import Mode
from openai import OpenAI

ASK: Any = {"model": MODEL, "messages": [USER], "response_model": Place, "max_tokens": 64, "max_retries": 1}


def chats(mode: Mode) -> Any:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=mode).chat.completions


def modes() -> None:
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA):
        assert isinstance(chats(mode).create(**ASK), Place), mode


def partial() -> None:
    assert list(chats(Mode.TOOLS).create_partial(**ASK))[-1].kind in ("city", "river")


run(modes, partial)
