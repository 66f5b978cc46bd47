"""Encoders give the states and classes that transformers gives, each text by itself, in whatever batch it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_encoder import FAMILIES, write_encoder
from torch import Tensor

from kernels.backends import ops_for
from worker_service.loading.checkpoint import Checkpoint
from worker_service.models.encoders.encoder import Encoder
from worker_service.models.registry import build_encoder, read_config

CPU = torch.device("cpu")
TEXTS = [[1, *range(10, 10 + length), 2] for length in (1, 5, 30, 5, 63, 1, 17)]


def load(path: Path, dtype: torch.dtype = torch.float32) -> Encoder:
    checkpoint = Checkpoint(path)
    encoder = build_encoder(read_config(checkpoint.config), dtype, CPU)
    checkpoint.load_into(encoder.checkpoint_tensors())
    encoder.pack()
    return encoder


def states(encoder: Encoder, texts: list[list[int]], num_first_tokens: int = 1 << 20) -> list[Tensor]:
    """Of texts in any order; those behind the first tokens of each have type 1."""
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    lengths = [len(texts[number]) for number in order]
    positions = torch.cat([torch.arange(length) for length in lengths])
    flat = torch.tensor([token for number in order for token in texts[number]])
    with torch.inference_mode():
        found = encoder.forward(flat, positions, (positions >= num_first_tokens).long(), lengths)
    return [part for _, part in sorted(zip(order, found.split(lengths), strict=True), key=lambda pair: pair[0])]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp(family), family)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return load(folder)


def of_transformers(network: Any, text: list[int], **others: Any) -> Any:
    with torch.inference_mode():
        return network(input_ids=torch.tensor([text]), attention_mask=torch.ones(1, len(text)), **others)


def test_states_of_a_mixed_batch_equal_transformers(folder: Path, encoder: Encoder) -> None:
    from transformers import AutoModel

    network = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    for text, found in zip(TEXTS, states(encoder, TEXTS), strict=True):
        torch.testing.assert_close(found, of_transformers(network, text).last_hidden_state[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_do_not_depend_on_the_texts_beside_them(dtype: torch.dtype, folder: Path) -> None:
    """With packed weights to the bit, because every row of a product is summed by itself."""
    encoder = load(folder, dtype)

    @settings(max_examples=20)
    @given(st.lists(st.integers(1, 60), max_size=12), st.randoms(use_true_random=False))
    def check(lengths: list[int], random: Any) -> None:
        others = [[random.randrange(5, 261) for _ in range(length)] for length in lengths]
        place = random.randrange(len(others) + 1)
        together = states(encoder, [*others[:place], TEXTS[2], *others[place:]])[place]
        (alone,) = states(encoder, [TEXTS[2]])
        if packs(dtype):
            assert torch.equal(together, alone)
        else:
            torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)

    check()


def packs(dtype: torch.dtype) -> bool:
    return ops_for(CPU).pack(torch.ones(2, 2, dtype=dtype)) is not None


def test_pairs_have_types_where_the_network_knows_them(tmp_path: Path) -> None:
    from transformers import AutoModel

    path = write_encoder(tmp_path, "bert")
    network = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    types = torch.tensor([[int(place >= 4) for place in range(len(TEXTS[4]))]])
    expected = of_transformers(network, TEXTS[4], token_type_ids=types).last_hidden_state[0]
    (found,) = states(load(path), [TEXTS[4]], num_first_tokens=4)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, states(load(path), [TEXTS[4]])[0], atol=1e-2)


@pytest.mark.parametrize("num_labels", [1, 2, 5])
def test_classes_equal_transformers(family: str, num_labels: int, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    path = write_encoder(tmp_path, family, num_labels)
    network = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="eager").eval()
    encoder = load(path)
    assert encoder.config.num_labels == num_labels
    for text, found in zip(TEXTS, states(encoder, TEXTS), strict=True):
        with torch.inference_mode():
            classes = encoder.classify(found)
        torch.testing.assert_close(classes, of_transformers(network, text).logits[0], rtol=1e-5, atol=1e-5)


def test_a_checkpoint_with_another_head_has_the_same_body(family: str, tmp_path: Path) -> None:
    """Most encoders are published as they were pretrained, to fill gaps."""
    from tiny_encoder import SIZES
    from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

    torch.manual_seed(1)
    network = AutoModelForMaskedLM.from_config(AutoConfig.for_model(family, **SIZES | FAMILIES[family]))
    network.save_pretrained(tmp_path)
    body = AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    (found,) = states(load(tmp_path), [TEXTS[2]])
    torch.testing.assert_close(found, of_transformers(body, TEXTS[2]).last_hidden_state[0], rtol=1e-5, atol=1e-5)


def test_positions_that_are_for_padding_do_not_count(family: str, folder: Path) -> None:
    most = read_config(Checkpoint(folder).config).max_model_len
    assert most == (65 if "roberta" in family else 66)


def test_encoder_decoders_of_these_families_are_refused() -> None:
    with pytest.raises(ValueError, match="bert is not supported as an encoder-decoder"):
        read_config({"model_type": "bert", "is_encoder_decoder": True})
