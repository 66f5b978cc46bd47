"""What the benchmark's program trains on is what a served model computes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import write_byte_tokenizer, write_marked_tokenizer, write_tiny_llama
from transformers import AutoProcessor

from bench.model import trained_images
from bench.model.drawn_shapes import COLOURS, SHAPES, draw

QUESTION = trained_images.QUESTIONS[0]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny text network with a token for each colour."""
    folder = tmp_path_factory.mktemp("seeing")
    write_byte_tokenizer(folder / "bytes")
    write_marked_tokenizer(folder / "tokenizer", folder / "bytes", list(COLOURS), "")
    write_tiny_llama(folder / "model", folder / "tokenizer", vocab_size=265, hidden_size=128, head_dim=32)
    return folder / "model"


@pytest.fixture(scope="module")
def built(source: Path) -> tuple[Any, Any]:
    model, tokenizer = trained_images.build(source)
    model.model.language_model.float()
    model.lm_head.float()
    return model, tokenizer


def test_no_question_about_an_image_sees_another(built: tuple[Any, Any]) -> None:
    model, tokenizer = built
    colours = torch.tensor([[0, 3, 5], [2, 4, 1]])
    with torch.inference_mode():
        images = trained_images.Descriptions(model, tokenizer)(colours)
        logits, wanted = trained_images.answers(model, tokenizer, images, colours, QUESTION)
        for row, shape in np.ndindex(*colours.shape):
            ids = [_ids(tokenizer, trained_images.HEAD), _ids(tokenizer, QUESTION.format(SHAPES[shape]))]
            ids += [_ids(tokenizer, trained_images.TAIL), _ids(tokenizer, list(COLOURS)[colours[row, shape]])]
            head, *others = (model.get_input_embeddings()(one) for one in ids)
            alone = model(inputs_embeds=torch.cat([head, images[row], *others])[None]).logits[0, -2:]
            torch.testing.assert_close(logits[row, shape], alone, rtol=1e-4, atol=1e-4)
            assert wanted[row, shape].tolist() == [*ids[-1].tolist(), tokenizer.token_to_id("<|im_end|>")]


def test_the_written_processor_makes_the_tokens_and_pixels_of_training(
    source: Path, built: tuple[Any, Any], tmp_path: Path
) -> None:
    model, tokenizer = built
    trained_images.save(model, tokenizer, source, tmp_path)
    drawn, question = draw(1), QUESTION.format("circle")
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    processor = AutoProcessor.from_pretrained(tmp_path)
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    inputs = processor(images=drawn.image, text=text, return_tensors="pt")
    image = trained_images.IMAGE_TOKEN * trained_images.NUM_PATCHES
    wanted = _ids(tokenizer, f"{trained_images.HEAD}{image}{question}{trained_images.TAIL}")
    assert inputs["input_ids"][0].tolist() == wanted.tolist()
    torch.testing.assert_close(inputs["pixel_values"], trained_images.pixels([drawn.image]), rtol=0, atol=1e-6)


def test_shapes_of_an_image_have_different_colours_and_do_not_overlap() -> None:
    for seed in range(50):
        drawn = draw(seed)
        assert len(set(drawn.colours)) == len(SHAPES)
        covered = drawn.shares.sum((0, 2)) * trained_images.SIZE**2 / trained_images.NUM_PATCHES
        smallest = (2 * 9 + 1) ** 2 / 2  # a triangle covers half of its square
        assert (covered > 0.9 * smallest).all()
        assert drawn.shares.sum((1, 2)).max() <= 1


def _ids(tokenizer: Any, text: str) -> torch.Tensor:
    return torch.tensor(tokenizer.encode(text).ids)
