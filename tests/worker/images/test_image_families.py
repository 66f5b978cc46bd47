"""Every family that reads images has transformers' tokens and probabilities."""

from pathlib import Path

import pytest
from image_worker import ImageWorker
from tiny_image_models import FAMILIES, ImageOracle, Prompt, make_model, picture

ONE, OTHER, LONG = picture(40, 60), picture(90, 33), picture(20, 70)
COUNT = 4
PROMPTS: list[Prompt] = [
    [5, 9, ONE, 14, 4, 77],
    [7, 8, 9, 10],
    [11, OTHER, 6, LONG, 8, ONE],
]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, name)
    oracle, worker = ImageOracle(path), ImageWorker(path)
    expected = {number: oracle.greedy(prompt, COUNT)[0] for number, prompt in enumerate(PROMPTS)}
    for chunk in (4096, 7):
        worker.begin()
        asked = [worker.ask(number, prompt) for number, prompt in enumerate(PROMPTS)]
        assert worker.generate(asked, COUNT, chunk) == expected, chunk


@pytest.mark.parametrize("name", ["llava of pixtral", "mistral3"])
def test_an_image_of_one_token_is_read_alone_and_beside_others(name: str, tmp_path: Path) -> None:
    """transformers reads Mistral 3's beside others only, so the last prompt has a second."""
    path = make_model(tmp_path, name)
    oracle, worker, tiny = ImageOracle(path), ImageWorker(path), picture(4, 4)
    prompts: list[Prompt] = [[5, tiny, 6, ONE, 7], [5, tiny, 6, tiny, 9]]
    asked = [worker.ask(number, prompt) for number, prompt in enumerate(prompts)]
    assert asked[0].message.items[0].num_embeddings == 1
    expected = {number: oracle.greedy(prompt, COUNT)[0] for number, prompt in enumerate(prompts)}
    assert worker.generate(asked, COUNT) == expected
