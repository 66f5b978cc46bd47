"""Settings of sentence-transformers for scores, from two files. Workers refuse unsupported values at start."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewire_common.model_files.shown import shown
from pagewire_common.start_error import StartError

FILE = "config_sentence_transformers.json"
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
_ACTIVATIONS = ("Identity", "Sigmoid")
_WITHOUT_EFFECT = (
    "__version__",  # the version of sentence-transformers that wrote the file
    "requirements",  # names of Python packages
)
_NEUTRAL = {
    "truncate_dim": "a request says `dimensions`",
    "keep_in_fp32_modules": "a worker computes all of a network in one type, and --dtype says which",
}


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """`similarity`: the function that compares vectors. `scores_plainly`: a classifier's raw output is the score."""

    similarity: str = "cosine"
    scores_plainly: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any], sentences: Mapping[str, Any], num_labels: int) -> "SentenceConfig":
        """`num_labels`: number of the network's classes; 0 if it is no classifier. Raises StartError."""
        known = {"model_type", "prompts", "default_prompt_name", "similarity_fn_name", "activation_fn"}
        if unknown := sorted(sentences.keys() - known - _NEUTRAL.keys() - {*_WITHOUT_EFFECT}):
            key = unknown[0]
            raise StartError(
                f"{FILE} says {shown(key)} = {shown(sentences[key])}, which is not known and may change vectors or "
                "scores; remove it if you know that it does not"
            )
        kinds = ("CrossEncoder",) if num_labels else ("SentenceTransformer",)
        if (kind := sentences.get("model_type")) not in (None, *kinds):
            raise StartError(f"{FILE}: model_type is {shown(kind)}; this network can be a {kinds[0]}")
        for key, reason in _NEUTRAL.items():
            if (value := sentences.get(key)) not in (None, [], {}):
                raise StartError(f"{FILE}: {key} is {shown(value)}, which is not supported: {reason}")
        _check_prompts(sentences)
        similarity = sentences.get("similarity_fn_name")
        if similarity is not None and similarity not in SIMILARITIES:
            raise StartError(f"{FILE}: similarity_fn_name is {shown(similarity)}; it must be {_listed(SIMILARITIES)}")
        return cls(similarity or "cosine", _activation(config, sentences, num_labels) == "Identity")


def _check_prompts(sentences: Mapping[str, Any]) -> None:
    """Refuse a default prompt for all texts. Callers put named prompts before their own texts."""
    prompts, default = sentences.get("prompts") or {}, sentences.get("default_prompt_name")
    if not (isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())):
        raise StartError(f"{FILE}: prompts is {shown(prompts)}; it must be an object of texts")
    if default is None:
        return
    if not isinstance(default, str) or default not in prompts:
        raise StartError(f"{FILE}: default_prompt_name is {shown(default)}, which is not among its prompts")
    if prompts[default]:
        raise StartError(
            f"{FILE}: default_prompt_name is {shown(default)}, so that every text would begin with "
            f"{shown(prompts[default])}; here callers write prompts before their texts: set it to null, and tell them"
        )


def _activation(config: Mapping[str, Any], sentences: Mapping[str, Any], num_labels: int) -> str | None:
    """A classifier's activation function, by its class name in torch, from up to three places, which must agree."""
    notes = config.get("sentence_transformers")
    if notes is not None and not isinstance(notes, dict):
        raise StartError(f"config.json: sentence_transformers is {shown(notes)}; it must be an object")
    said = {
        f"{FILE}: activation_fn": sentences.get("activation_fn"),
        "config.json: sentence_transformers.activation_fn": (notes or {}).get("activation_fn"),
        "config.json: sbert_ce_default_activation_function": config.get("sbert_ce_default_activation_function"),
    }
    found: dict[str, str] = {}
    for place, name in said.items():
        if name is None or not num_labels:
            continue
        package, _, kind = name.rpartition(".") if isinstance(name, str) else ("", "", "")
        if package.partition(".")[0] != "torch" or kind not in _ACTIVATIONS:
            raise StartError(f"{place} is {shown(name)}; supported are torch.nn.Identity and torch.nn.Sigmoid")
        if kind == "Sigmoid" and num_labels == 2:  # a classifier with more than two labels gives no single score
            raise StartError(
                f"{place} is {shown(name)} over two classes; the score of two classes is the second one's "
                "share of a softmax"
            )
        found[place] = kind
    if len({*found.values()}) > 1:
        raise StartError(" and ".join(f"{place} is {kind}" for place, kind in found.items()) + "; remove the wrong one")
    return next(iter(found.values()), None)


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
