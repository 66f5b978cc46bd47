"""The files of a model that say how images are read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pagewire_common.images.settings import Settings
from pagewire_common.model_files.shown import shown
from pagewire_common.model_files.tokenizer_config import TokenizerConfig

Encode = Callable[[str], Sequence[int]]
"""Token ids of a text in which special tokens are recognised, without tokens before and after it."""


@dataclass(frozen=True, slots=True)
class ModelImages:
    """`vision`: `vision_config` of config.json. `processor`: processor_config.json. `pixels`: the settings of the image
    processor, from preprocessor_config.json or processor_config.json."""

    family: str
    config: Settings
    vision: Settings
    processor: Settings
    pixels: Settings
    tokenizer: TokenizerConfig
    encode: Encode

    def token(self, name: str, default: str) -> str:
        """The text of a token, such as `image_token`, that the tokenizer's files may name."""
        named = self.tokenizer.special.get(name)
        return default if named is None else named.content

    def token_id(self, text: str) -> int:
        found = self.encode(text)
        if len(found) != 1:
            raise ValueError(f"the tokenizer has no token {shown(text)}, which stands for images")
        return found[0]

    def image_token_id(self, text: str, default: int) -> int:
        """The id of the image token in config.json, which must be the id of `text`."""
        keys = [key for key in ("image_token_id", "image_token_index") if key in self.config]
        found = {self.config.integer(key, default, least=0) for key in keys} or {default}
        if found != {token_id := self.token_id(text)}:
            raise ValueError(
                f"config.json says {shown(sorted(found))} for the image token; in the tokenizer, {shown(text)} is "
                f"{token_id}"
            )
        return token_id

    def image_processor(self, *types: str) -> str:
        """The type of the image processor, which must be one of `types`; the first if the files do not name it."""
        named = self.pixels.text("image_processor_type", self.pixels.text("feature_extractor_type", types[0]))
        found = named.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast").removesuffix("Pil")
        if found not in types:
            raise self.pixels.refused("image_processor_type", " or ".join(types))
        return found


def same(what: str, found: Mapping[str, object]) -> None:
    """Refuse different values for the same property. `found`: the values, by the place where each is stated."""
    if len({*found.values()}) > 1:
        said = " and ".join(f"{value} in {where}" for where, value in found.items())
        raise ValueError(f"{what} is {said}; the values must be equal")
