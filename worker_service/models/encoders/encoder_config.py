"""Reads the config.json of an encoder: tokens attend to earlier and later tokens of their text."""

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from types import MappingProxyType
from typing import Any, ClassVar

from transformers import AutoModel, AutoModelForSequenceClassification

from worker_service.models.config.config_keys import architectures
from worker_service.models.config.config_limits import check_padding
from worker_service.models.config.transformers_json import parse
from worker_service.models.config.transformers_keys import check_known
from worker_service.read_keys import ReadKeys
from worker_service.wording import named

_FILLS_GAPS = ("ForMaskedLM", "ForPreTraining")
_HEADS = {"bert": "cls", "roberta": "lm_head", "xlm-roberta": "lm_head", "modernbert": "head|decoder"}
"""Patterns for a masked-language-model head's tensors, by family."""
_UNUSED = (
    "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
    "pooler_type", "sbert_ce_default_activation_function", "sentence_transformers",
)  # fmt: skip
"""Ignored keys: poolers that no supported network has, and sentence-transformers' scores, which the scheduler reads."""
MAX_LABELS = 1 << 16
"""Labels of a classifier; transformers creates a name for each."""


@dataclass(frozen=True)
class EncoderConfig:
    """Families: `registry.ENCODERS`. Encoders need no KV cache."""

    network: Any
    """transformers' configuration object."""
    network_class: Any
    prefix: str
    """Prefix of tensor names, such as "bert."; checkpoints without output head may lack it."""
    vocabulary_size: int
    hidden_size: int
    max_model_len: int
    num_labels: int
    """Outputs of the classifier; 0 without a classifier."""
    first_position: int
    """Position of the first token: RoBERTa reserves smaller ones for padding."""
    has_types: bool
    """Whether the two texts of a pair are distinguished (token_type_ids)."""
    ignored_tensors: tuple[str, ...]
    """Patterns for unused checkpoint tensors, such as a pooler."""

    num_layers = num_kv_heads = head_dim = 0
    kv_parts = 2
    sliding_window = None
    windows = ()

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> "EncoderConfig":
        """Raises ValueError if the network is not supported."""
        keys = ReadKeys(json)
        keys.integer("num_labels", None, null=None, most=MAX_LABELS)
        names = architectures(json) or [""]
        # Without effect on results: chunks could fail for odd numbers of tokens, and outputs need names.
        network, name = parse({**json, "chunk_size_feed_forward": 0, "return_dict": True}), names[0]
        classifies = name.endswith("ForSequenceClassification")
        mapping = (AutoModelForSequenceClassification if classifies else AutoModel)._model_mapping
        network_class = mapping[type(network)]
        if network.is_encoder_decoder:
            raise ValueError(
                f"is_encoder_decoder is true; a model {network.model_type} is not supported as an encoder-decoder"
            )
        body = AutoModel._model_mapping[type(network)]
        if not (classifies or name in ("", body.__name__) or name.endswith(_FILLS_GAPS)):
            raise ValueError(
                f"architectures names {named(name)}, whose head is not supported; supported are no head, a "
                "classifier of whole texts, and a masked-language-model head"
            )
        keys.without_effect(*_UNUSED)
        check_known(keys.unread(), network, network_class)
        check_padding(network)
        if hasattr(network, "type_vocab_size"):
            keys.integer("type_vocab_size", None)
        longest, first = network.max_position_embeddings, 0
        if network.model_type in ("roberta", "xlm-roberta"):
            first = _first_position(network)
        return cls(
            network=network,
            network_class=network_class,
            prefix="" if classifies else f"{body.base_model_prefix}.",  # a classifier's names include the prefix
            vocabulary_size=network.vocab_size,
            hidden_size=network.hidden_size,
            max_model_len=longest - first,
            num_labels=network.num_labels if classifies else 0,
            first_position=first,
            has_types=getattr(network, "type_vocab_size", 0) > 1,
            ignored_tensors=() if classifies else (r"(^|\.)pooler\.", rf"^({_HEADS[network.model_type]})\."),
        )

    tied: ClassVar[Mapping[str, str]] = MappingProxyType({})
    own_tensors: ClassVar[frozenset[str]] = frozenset()

    def untied(self, own: frozenset[str]) -> "EncoderConfig":
        """Encoders have no tied tensors."""
        del own
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the network's constructor. Only classifiers have a pooler."""
        has_pooler = not self.num_labels and "add_pooling_layer" in signature(self.network_class.__init__).parameters
        return {"add_pooling_layer": False} if has_pooler else {}


def _first_position(network: Any) -> int:
    """RoBERTa: the padding token's id plus 1."""
    token, longest = network.pad_token_id, network.max_position_embeddings
    if token is None or not 0 <= token < longest - 1:
        raise ValueError(
            f"pad_token_id is {token}, and max_position_embeddings {longest}: positions begin after the first and end "
            "before the second"
        )
    return int(token) + 1
