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
