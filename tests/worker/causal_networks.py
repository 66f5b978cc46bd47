"""Networks of transformers that continue text, also of types that its `AutoModelForCausalLM` lacks."""

from typing import Any


def auto_class_of(config: Any) -> Any:
    """config: a configuration object. Mistral 4 is among the networks for images, although it reads texts alone."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
