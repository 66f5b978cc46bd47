"""A head that is trained here guesses, when it is served, as it did in training, and is then often right."""

from pathlib import Path
from typing import Any

import pytest
import torch
from slow_heads import SlowEagle
from tiny_model import write_byte_tokenizer, write_tiny_llama
from transformers import AutoModelForCausalLM

from bench.model import trained_head

NUM_GUESSABLE = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    write_byte_tokenizer(folder / "tokenizer")
    write_tiny_llama(folder / "model", folder / "tokenizer")
    return folder / "model"


@pytest.fixture(scope="module")
def target(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model)


@pytest.fixture(scope="module")
def texts(target: Any) -> list[list[int]]:
    """What the model says."""
    prompts = torch.arange(40).view(10, 4) + 70
    found = target.generate(prompts, max_new_tokens=28, do_sample=False, pad_token_id=0, eos_token_id=None)
    return [*found.tolist()]


@pytest.fixture(scope="module")
def head(target: Any, texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head") / "trained"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_head, "LEARNING_RATE", 5e-3)
        right = trained_head.train(target, texts, texts[:3], folder, NUM_GUESSABLE, epochs=60)
    assert min(right) > 0.2  # of texts that it was trained on; by chance it would be one of 120
    return folder


def test_each_depth_sees_what_it_will_see_when_it_guesses(
    model: Path, target: Any, texts: list[list[int]], head: Path
) -> None:
    slow = SlowEagle(model, head)
    trained = trained_head.Head(target, torch.arange(len(slow.weights["d2t"])) + slow.weights["d2t"])
    for name, weight in trained.weights.items():
        weight.data.copy_(slow.weights[f"{trained_head.NAMES[name].removeprefix('midlayer.')}.weight"])
    text = texts[0]
    example = trained_head.read(target, text)
    num_places = len(text) - 1 - trained_head.DEPTH
    states, earlier = trained.combine(example.states[:num_places]), list[trained_head.Pair]()
    for depth in range(trained_head.DEPTH):
        states, logits, pair = trained(example.token_ids[depth + 1 : depth + 1 + num_places], states, depth, earlier)
        earlier.append(pair)
        for place in (0, 7, num_places - 1):
            wanted = slow.logits(text[: place + 2], text[place + 2 : place + 2 + depth])
            torch.testing.assert_close(logits[place], wanted[wanted.isfinite()], atol=1e-3, rtol=1e-3)
