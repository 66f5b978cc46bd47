"""Parses the flag `--speculative-config`: JSON with the keys and methods of vLLM's flag of the same name."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pagewire_common.model_files.json_text import loads

Method = Literal["ngram", "draft_model", "eagle3", "mtp"]
OLD_METHODS: dict[str, Method] = {"ngram": "ngram", "draft": "draft_model", "eagle": "eagle3", "mtp": "mtp"}
"""The `method` of each value of `--speculate`, a flag of the previous release."""

FEWEST = 2
"""Default minimum of last tokens that must have occurred before. A single token nearly always has."""
MAX = 16
"""Default maximum of last tokens to compare. More gave no better drafts."""


class SpeculativeConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    method: Method
    model: str | None = None
    num_speculative_tokens: int = Field(8, ge=1, le=64)
    prompt_lookup_min: int | None = Field(None, ge=1, le=1024)
    prompt_lookup_max: int | None = Field(None, ge=1, le=1024)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError with a sentence for the user."""
        try:
            config = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            if first["type"] == "extra_forbidden":
                known = ", ".join(cls.model_fields)
                raise ValueError(f"the key {key!r} is not known here; known are {known}") from None
            raise ValueError(f"{key}: {first['msg']}" if key else first["msg"].removeprefix("Value error, ")) from None
        loads(text)  # pydantic does not refuse duplicate keys
        return config

    @model_validator(mode="after")
    def _keys_of_the_method(self) -> Self:
        if (self.model is not None) != (self.method in ("draft_model", "eagle3")):
            raise ValueError('"model" goes together with the methods "draft_model" and "eagle3", which need one')
        if self.method != "ngram" and (self.prompt_lookup_min or self.prompt_lookup_max):
            raise ValueError('"prompt_lookup_min" and "prompt_lookup_max" are for the method "ngram"')
        if self.fewest > self.longest:
            raise ValueError(f'"prompt_lookup_min" is {self.fewest}, and "prompt_lookup_max" {self.longest}')
        return self

    @property
    def flag(self) -> str:
        """Flag and method, for error messages."""
        return f'--speculative-config with the method "{self.method}"'

    @property
    def fewest(self) -> int:
        """Last tokens that must have occurred before, for the method ngram."""
        return self.prompt_lookup_min or min(FEWEST, self.prompt_lookup_max or FEWEST)

    @property
    def longest(self) -> int:
        """Last tokens to compare at most, for the method ngram."""
        return self.prompt_lookup_max or max(MAX, self.prompt_lookup_min or MAX)
