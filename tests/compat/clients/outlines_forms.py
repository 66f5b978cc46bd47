"""outlines: choices, types and regular expressions through its OpenAI and vLLM models."""

from typing import Literal

import outlines
from checks import MODEL, QUESTION, URL, Place, run
from openai import OpenAI
from outlines.types import Regex

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


def openai_model() -> None:
    model = outlines.from_openai(client, MODEL)
    assert Place.model_validate_json(model(QUESTION, Place, max_tokens=48))
    assert Place.model_validate_json("".join(model.stream(QUESTION, Place, max_tokens=48)))


def vllm_model() -> None:
    model = outlines.from_vllm(client, MODEL)
    assert Place.model_validate_json(model(QUESTION, Place, max_tokens=48))
    assert model(QUESTION, Literal["yes", "no"], max_tokens=8) in ("yes", "no")
    assert model(QUESTION, Regex("[0-9]{3}"), max_tokens=8).isdigit()


run(openai_model, vllm_model)
