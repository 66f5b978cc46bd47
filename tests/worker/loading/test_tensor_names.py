"""A checkpoint's tensors are found under every name under which transformers finds them."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_encoder import FAMILIES, SIZES, write_encoder
from tiny_encoder_decoder import write_encoder_decoder
from torch import Tensor

from pagewire_common.start_error import StartError
from worker_service.loading.checkpoint import Checkpoint
from worker_service.models.registry import (
    ENCODER_DECODERS,
    ENCODERS,
    build_encoder,
    build_encoder_decoder,
    build_model,
    read_config,
)

Rename = Callable[[str], str]


def loaded(path: Path) -> Mapping[str, Tensor]:
    """The weights of a checkpoint as a worker has them before they are packed, by their names here."""
    checkpoint = Checkpoint(path)
    config = read_config(checkpoint.config)
    config = config.untied(checkpoint.own(config.tied))
    family = checkpoint.config["model_type"]
    build: Any = build_encoder if family in ENCODERS else build_model
    build = build_encoder_decoder if family in ENCODER_DECODERS else build
    places: dict[str, Tensor] = build(config, torch.float32, torch.device("cpu")).checkpoint_tensors()
    for place in places.values():
        place.fill_(float("nan"))
    checkpoint.check(places)
    checkpoint.check_none_left({*places, *config.tied}, config.ignored_tensors)
    checkpoint.load_into(places)
    return places


def assert_as_transformers(path: Path, kind: Any) -> None:
    expected = kind.from_pretrained(path).state_dict()
    found = loaded(path)
    assert len(found) >= 20
    for name, place in found.items():
        theirs = expected[name] if name in expected else expected[name.partition(".")[2]]
        assert torch.equal(place, theirs), name


def change(source: Path, target: Path, rename: Rename, without: tuple[str, ...] = (), **config: Any) -> Path:
    """A copy whose tensors have other names, or are left out; in config.json keys have other values, or none."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    renamed = {rename(name): tensor for name, tensor in tensors.items() if name not in without}
    save_file(renamed, target / "model.safetensors")
    known = json.loads((source / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps({key: value for key, value in known.items() if value is not None}))
    return target


def same(name: str) -> str:
    return name


def first_names(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


PREFIX = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta.", "modernbert": "model."}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def body(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp(family), family)


@pytest.fixture(scope="module")
def filler(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the head that fills gaps."""
    from transformers import AutoConfig, AutoModelForMaskedLM

    folder = tmp_path_factory.mktemp(f"{family} with a head")
    AutoModelForMaskedLM.from_config(AutoConfig.for_model(family, **SIZES | FAMILIES[family])).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("prefixed", [True, False])
def test_an_encoder_is_found_with_and_without_its_prefix(
    named: bool, prefixed: bool, family: str, body: Path, tmp_path: Path
) -> None:
    from transformers import AutoModel

    def rename(name: str) -> str:
        return first_names(f"{PREFIX[family]}{name}" if prefixed else name)

    architectures = json.loads((body / "config.json").read_text())["architectures"] if named else None
    assert_as_transformers(change(body, tmp_path / "changed", rename, architectures=architectures), AutoModel)


@pytest.mark.parametrize("architectures", [None, "body", "filler"])
def test_an_encoder_is_found_beside_the_head_of_its_first_training(
    architectures: str | None, body: Path, filler: Path, tmp_path: Path
) -> None:
    from transformers import AutoModel

    named = {"body": body, "filler": filler}.get(architectures or "")
    names = json.loads((named / "config.json").read_text())["architectures"] if named else None
    assert_as_transformers(change(filler, tmp_path / "changed", first_names, architectures=names), AutoModel)


def test_a_classifier_is_found_by_the_first_names(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    source = write_encoder(tmp_path / "source", "bert", num_labels=3)
    assert_as_transformers(change(source, tmp_path / "old", first_names), AutoModelForSequenceClassification)


def test_another_part_than_the_known_heads_is_refused(filler: Path, tmp_path: Path) -> None:
    source = change(filler, tmp_path / "changed", lambda name: name)
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"score.weight": torch.ones(2, 48)}, source / "model.safetensors")
    with pytest.raises(StartError, match=r"the network of config\.json does not use: score\.weight"):
        loaded(source)


def test_a_tensor_under_both_names_is_refused(tmp_path: Path) -> None:
    source = write_encoder(tmp_path, "bert")
    tensors = load_file(source / "model.safetensors")
    old = {"embeddings.LayerNorm.gamma": torch.ones(48)}
    save_file(tensors | old, source / "model.safetensors")
    with pytest.raises(StartError, match=r"not use: embeddings\.LayerNorm\.gamma"):
        loaded(source)


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder_decoder(tmp_path_factory.mktemp("bart"), "bart")


def test_a_bart_without_prefix_and_without_the_bias_of_its_head_is_read(bart: Path, tmp_path: Path) -> None:
    """As bart-base and bart-large are published."""
    from transformers import AutoModelForSeq2SeqLM

    path = change(
        bart,
        tmp_path / "base",
        lambda name: name.removeprefix("model."),
        without=("final_logits_bias",),
        architectures=["BartModel"],
    )
    assert_as_transformers(path, AutoModelForSeq2SeqLM)
    assert not loaded(path)["final_logits_bias"].any()


@pytest.mark.parametrize("name", ["model.encoder.embed_tokens.weight", "lm_head.weight"])
def test_tied_tensors_are_found_under_any_of_their_names(name: str, bart: Path, tmp_path: Path) -> None:
    """Tools that write each tensor once keep the first of its names, whichever that is."""
    from transformers import AutoModelForSeq2SeqLM

    path = change(bart, tmp_path / "changed", lambda one: name if one == "model.shared.weight" else one)
    assert_as_transformers(path, AutoModelForSeq2SeqLM)


@pytest.mark.parametrize("kept", ["embed_tokens.weight", "model.embed_tokens.weight", "lm_head.weight"])
def test_a_decoder_is_found_without_its_prefix_and_by_its_head(kept: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3}
    network: Any = AutoModelForCausalLM.from_config(
        LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True)
    )
    network.save_pretrained(tmp_path / "source")
    short = kept != "model.embed_tokens.weight"

    def rename(name: str) -> str:
        return kept if "embed_tokens" in name else name.removeprefix("model.") if short else name

    assert_as_transformers(change(tmp_path / "source", tmp_path / "changed", rename), AutoModelForCausalLM)
    if kept != "lm_head.weight":
        bare = change(tmp_path / "source", tmp_path / "bare", same, without=("model.embed_tokens.weight",))
        with pytest.raises(StartError, match=r"the weights lack the tensor model\.embed_tokens\.weight"):
            loaded(bare)
