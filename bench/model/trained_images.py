"""Trains a small model that reads images, serves it, and counts its right answers about images that it has not seen.

python -m bench trained_images [--folder FOLDER] [--images 200] [--model default]

The model is LLaVA's: a small CLIP tower, a projector, and the text network of the default model, which is not trained.
An image shows a circle, a square and a triangle in three of six colours. The text network first teaches the
embeddings that describe each pair of a shape and a colour, without images. Then tower and projector learn to compute
these embeddings from images. Everything is drawn from seeds. The served model answers questions over HTTP.
"""

import argparse
import asyncio
import base64
import io
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from bench.model.drawn_shapes import COLOURS, ROWS, SHAPES, SIZE, draw
from pagewire_client import LocalServer
from worker_service.loading.model_store import find_model

QUESTIONS = (
    "Which colour is the {}?", "What color is the {}?", "What colour is the {}?", "Which color is the {}?",
)  # fmt: skip
HEAD, TAIL = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
IMAGE_TOKEN, END_TOKEN = "<image>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUM_PATCHES = ROWS**2
WORDS = NUM_PATCHES // len(SHAPES)
"""Embeddings of an image that describe one shape."""
SEEN = SIZE // 2
"""Width and height in pixels to which the image processor resizes images."""
DESCRIBED = torch.arange(len(SHAPES)).repeat_interleave(WORDS)
"""The shape that each embedding describes, except the last, which is the same for all images."""
DESCRIPTION_STEPS, SEEING_STEPS, REFINING_STEPS = 100, 1200, 300
BATCH = 32
GOAL = 0.95
HELD_OUT = 1_000_000_000
"""Seeds from here on are for images that the model does not see while it is trained."""


def build(source: Path) -> tuple[Any, Any]:
    """The model around the text network in `source`, in bfloat16, with an untrained tower and projector in float32, and
    its tokenizer with a token for images."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import AutoModelForCausalLM, CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(IMAGE_TOKEN, special=True, normalized=False)])
    text = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    text.resize_token_embeddings(tokenizer.get_vocab_size(), pad_to_multiple_of=64, mean_resizing=False)
    vision = CLIPVisionConfig(
        image_size=SEEN, patch_size=SEEN // ROWS, hidden_size=192, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=3, projection_dim=192,
    )  # fmt: skip
    image_id = tokenizer.token_to_id(IMAGE_TOKEN)
    config = LlavaConfig(
        vision_config=vision, text_config=text.config, image_token_index=image_id, image_seq_length=NUM_PATCHES,
        vision_feature_layer=-1, tie_word_embeddings=text.config.tie_word_embeddings,
    )  # fmt: skip
    torch.manual_seed(0)
    llava = LlavaForConditionalGeneration(config)
    llava.model.language_model.load_state_dict(text.model.state_dict())
    llava.lm_head.load_state_dict(text.lm_head.state_dict())
    llava.tie_weights()
    for part in (llava.model.language_model, llava.lm_head):
        part.to(torch.bfloat16).requires_grad_(False)
    return llava.eval(), tokenizer


# ---- what the text network understands


class Descriptions(nn.Module):
    """Embeddings of an image, by the colours of its shapes. They begin as the words of sentences.

    `by_colour` [shapes, colours, WORDS, hidden] is added to `same` [patches, hidden].
    """

    def __init__(self, llava: Any, tokenizer: Any) -> None:
        super().__init__()
        embed = llava.get_input_embeddings()
        ids = [[tokenizer.encode(f" The {shape} is {colour}.").ids[:WORDS] for colour in COLOURS] for shape in SHAPES]
        self.by_colour = nn.Parameter(embed(torch.tensor(ids)).float())
        self.same = nn.Parameter(torch.zeros(NUM_PATCHES, self.by_colour.shape[-1]))

    def forward(self, colours: Tensor) -> Tensor:
        """[images, patches, hidden], for the colours [images, shapes]."""
        described = torch.cat([self.by_colour[shape, colours[:, shape]] for shape in range(len(SHAPES))], 1)
        return self.same + functional.pad(described, (0, 0, 0, NUM_PATCHES - described.shape[1]))


def learn_descriptions(llava: Any, tokenizer: Any, steps: int, images: int = 4, rate: float = 0.05) -> Descriptions:
    """Train descriptions until the text network answers each question with a colour and ends. Noise makes the answers
    independent of small errors of the descriptions."""
    descriptions, chance = Descriptions(llava, tokenizer), random.Random(0)
    size = descriptions.by_colour.detach().square().mean().sqrt().item()
    training = Training([*descriptions.parameters()], rate * size, steps)
    torch.manual_seed(0)
    for step in range(steps):
        colours = torch.tensor([chance.sample(range(len(COLOURS)), len(SHAPES)) for _ in range(images)])
        described = descriptions(colours)
        described = described + 0.1 * size * torch.randn_like(described)
        logits, wanted = answers(llava, tokenizer, described, colours, QUESTIONS[step % len(QUESTIONS)])
        training.step(functional.cross_entropy(logits.flatten(0, 2), wanted.flatten()), "descriptions")
    return descriptions.requires_grad_(False)


def answers(llava: Any, tokenizer: Any, images: Tensor, colours: Tensor, question: str) -> tuple[Tensor, Tensor]:
    """Logits [images, shapes, 2, vocabulary] of the colour and the end of each answer, and the right tokens.

    `images` [images, patches, hidden] are embeddings. The questions about an image follow it in one sequence, in which
    none sees another, so the image is computed once.
    """
    embed, end = llava.get_input_embeddings(), tokenizer.token_to_id(END_TOKEN)
    answer_ids = torch.tensor([tokenizer.encode(colour).ids for colour in COLOURS])[colours]  # one token each
    before = embed(torch.tensor(tokenizer.encode(HEAD).ids))
    questions = [tokenizer.encode(question.format(shape) + TAIL).ids for shape in SHAPES]
    prefix = len(before) + NUM_PATCHES
    parts, positions, places = [before.expand(len(images), -1, -1), images.to(before.dtype)], [*range(prefix)], []
    group = [-1] * prefix
    for shape, ids in enumerate(questions):
        parts += [embed(torch.tensor(ids)).expand(len(images), -1, -1), embed(answer_ids[:, shape])]
        positions += range(prefix, prefix + len(ids) + 1)
        group += [shape] * (len(ids) + 1)
        places.append([len(group) - 2, len(group) - 1])
    groups = torch.tensor(group)
    is_seen = ((groups == -1) | (groups == groups[:, None])).tril()
    mask = torch.zeros(is_seen.shape, dtype=before.dtype).masked_fill(~is_seen, torch.finfo(before.dtype).min)
    states = llava.model.language_model(
        inputs_embeds=torch.cat(parts, 1), attention_mask=mask.expand(len(images), 1, -1, -1),
        position_ids=torch.tensor([positions]), use_cache=False,
    ).last_hidden_state  # fmt: skip
    return llava.lm_head(states[:, torch.tensor(places)]).float(), torch.cat(
        [answer_ids, torch.full_like(answer_ids, end)], -1
    )


# ---- what the tower sees


def learn_to_see(llava: Any, descriptions: Descriptions, steps: int, refining_steps: int) -> None:
    """Train tower and projector until they compute an image's description."""
    tower, projector = llava.model.vision_tower, llava.model.multi_modal_projector
    learn_colours(tower, Heads(tower.config.hidden_size), steps)
    start_projector(tower, projector, descriptions)
    refine(tower, projector, descriptions, refining_steps)


class Heads(nn.Module):
    """Linear layers for training alone. From the last states: which patch it is, and the colour of the shape that this
    patch's embedding describes. From the states of the middle: the parts of the patch that shapes cover."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.patch = nn.Linear(hidden_size, NUM_PATCHES)
        self.colour = nn.Linear(hidden_size, len(COLOURS))
        self.shares = nn.Linear(hidden_size, len(SHAPES) * len(COLOURS))


def learn_colours(tower: Any, heads: Heads, steps: int, rate: float = 2e-3) -> None:
    """Train the tower to see which shape has which colour. This takes far fewer steps than learning embeddings."""
    training = Training([*tower.parameters(), *heads.parameters()], rate, steps)
    for step in range(steps):
        values, colours, shares = see(step * BATCH, BATCH)
        states = tower(values, output_hidden_states=True).hidden_states
        last, middle = states[-1][:, 1:], states[len(states) // 2][:, 1:]
        patches = torch.arange(NUM_PATCHES).expand(BATCH, -1)
        loss = functional.cross_entropy(heads.patch(last).flatten(0, 1), patches.flatten())
        told = heads.colour(last[:, : len(DESCRIBED)]).flatten(0, 1)
        loss = loss + functional.cross_entropy(told, colours[:, DESCRIBED].flatten())
        near = functional.binary_cross_entropy_with_logits(heads.shares(middle), shares.flatten(2))
        training.step(loss + 20 * near, "colours")


@torch.no_grad()
def start_projector(tower: Any, projector: Any, descriptions: Descriptions) -> None:
    """Set the projector's weights by least squares. Its first layer has a unit for each patch and colour."""
    seen = [see(HELD_OUT // 2 + first, 64) for first in range(0, 1024, 64)]
    states = torch.cat([last_states(tower, values) for values, _, _ in seen])
    colours = torch.cat([colours for _, colours, _ in seen])
    patch, patch_bias = _fit(states, torch.eye(NUM_PATCHES).expand(len(states), -1, -1))
    colour, colour_bias = _fit(
        states[:, : len(DESCRIBED)], functional.one_hot(colours[:, DESCRIBED], len(COLOURS)).float()
    )
    number = NUM_PATCHES * len(COLOURS)
    projector.linear_1.weight[:number] = 8 * (patch[:, None] + colour).flatten(0, 1)
    projector.linear_1.bias[:number] = 8 * (patch_bias[:, None] + colour_bias - 1.5).flatten()
    units = projector.act(projector.linear_1(states))
    weight, bias = _fit(units, descriptions(colours))
    projector.linear_2.weight.copy_(weight)
    projector.linear_2.bias.copy_(bias)


def _fit(inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of the linear layer that computes `outputs` with the least squared error."""
    rows = functional.pad(inputs.flatten(0, -2), (0, 1), value=1.0).double()
    products = rows.T @ rows
    products.diagonal().add_(1e-6 * products.diagonal().mean())
    solved = torch.linalg.solve(products, rows.T @ outputs.flatten(0, -2).double()).float()
    return solved[:-1].T, solved[-1]


def refine(tower: Any, projector: Any, descriptions: Descriptions, steps: int, rate: float = 1e-3) -> None:
    """Train tower and projector together on the error of descriptions, relative to what differs between colours."""
    by_colour = descriptions.by_colour
    scale = (by_colour - by_colour.mean(1, keepdim=True)).square().mean()
    training = Training([*tower.parameters(), *projector.parameters()], rate, steps)
    for step in range(steps):
        values, colours, _ = see(HELD_OUT // 4 + step * BATCH, BATCH)
        errors = projector(last_states(tower, values)) - descriptions(colours)
        training.step(errors.square().mean() / scale, "refining")


def last_states(tower: Any, values: Tensor) -> Tensor:
    """The tower's last states [images, patches, hidden], without the state of the class token."""
    states: Tensor = tower(values, output_hidden_states=True).hidden_states[-1][:, 1:]
    return states


def see(seed: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels, colours [images, shapes] and shares [images, patches, shapes, colours] of successive images."""
    drawn = [draw(seed + place) for place in range(number)]
    values = pixels([one.image for one in drawn])
    shares = torch.from_numpy(np.stack([one.shares for one in drawn]))
    return values, torch.tensor([one.colours for one in drawn]), shares


def pixels(images: list[Image.Image]) -> Tensor:
    """[images, 3, SEEN, SEEN] float32, as the model's image processor computes it."""
    values = np.stack([np.asarray(one.resize((SEEN, SEEN), Image.Resampling.BICUBIC)) for one in images])
    return torch.from_numpy(values.astype(np.float32) / 127.5 - 1).permute(0, 3, 1, 2).contiguous()


class Training:
    """Steps of AdamW whose learning rate rises to `rate` and falls again."""

    def __init__(self, weights: list[nn.Parameter], rate: float, steps: int) -> None:
        self.weights, self.done, self.began = weights, 0, time.monotonic()
        self.optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.01, betas=(0.9, 0.95))
        self.rates = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, rate, total_steps=steps, pct_start=0.1)

    def step(self, loss: Tensor, name: str) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.rates.step()
        if self.done % 25 == 0:
            seconds = time.monotonic() - self.began
            sys.stderr.write(f"{name}, step {self.done}: loss {loss.item():.3f}, {seconds:.0f} s\n")
        self.done += 1


def save(llava: Any, tokenizer: Any, source: Path, folder: Path) -> None:
    """Write a model folder in the form of published LLaVA models. Its weights are in bfloat16."""
    from transformers import CLIPImageProcessorPil

    llava.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = json.loads((source / "tokenizer_config.json").read_text())
    about.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"image_token": IMAGE_TOKEN}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    if (source / "generation_config.json").exists():
        (folder / "generation_config.json").write_bytes((source / "generation_config.json").read_bytes())
    size, half = {"height": SEEN, "width": SEEN}, [0.5] * 3
    images = CLIPImageProcessorPil(size={"shortest_edge": SEEN}, crop_size=size, image_mean=half, image_std=half)
    images.save_pretrained(folder)
    processor = {
        "image_token": IMAGE_TOKEN, "num_additional_image_tokens": 1, "patch_size": SEEN // ROWS,
        "processor_class": "LlavaProcessor", "vision_feature_select_strategy": "default",
    }  # fmt: skip
    (folder / "processor_config.json").write_text(json.dumps(processor))


# ---- the served model


async def count_right(url: str, number: int) -> int:
    """Images, sent eight at a time over HTTP, about which the model answers right."""
    turns = asyncio.Semaphore(8)

    async def ask(session: aiohttp.ClientSession, place: int) -> bool:
        drawn, shape = draw(HELD_OUT + place), place % len(SHAPES)
        file = io.BytesIO()
        drawn.image.save(file, "PNG")
        data = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        question = {"type": "text", "text": QUESTIONS[0].format(SHAPES[shape])}
        content = [{"type": "image_url", "image_url": {"url": data}}, question]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
        async with turns, session.post(f"{url}/v1/chat/completions", json=body) as response:
            found = await response.json()
            if response.status != 200:
                raise RuntimeError(found)
        return bool(found["choices"][0]["message"]["content"] == list(COLOURS)[drawn.colours[shape]])

    async with aiohttp.ClientSession() as session:
        return sum(await asyncio.gather(*(ask(session, place) for place in range(number))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="the trained model's folder, used as it is if it exists")
    parser.add_argument("--images", type=int, default=200, help="images that are asked about")
    parser.add_argument("--model", default="default", help="the text network, of the Llama family")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "model"
        if not folder.exists():
            began, cpu_began = time.monotonic(), time.process_time()
            source = find_model(arguments.model, Path("~/.cache/pagewire").expanduser()).path
            llava, tokenizer = build(source)
            descriptions = learn_descriptions(llava, tokenizer, DESCRIPTION_STEPS)
            learn_to_see(llava, descriptions, SEEING_STEPS, REFINING_STEPS)
            save(llava, tokenizer, source, folder)
            seconds, cpu_seconds = time.monotonic() - began, time.process_time() - cpu_began
            sys.stdout.write(f"trained in {seconds:.0f} s, of which {cpu_seconds:.0f} s of CPU time\n")
        with LocalServer(str(folder)) as server:
            right = asyncio.run(count_right(server.http_url, arguments.images))
    sys.stdout.write(f"{right} of {arguments.images} answers about new images are right\n")
    if right < GOAL * arguments.images:
        sys.exit(f"bench trained_images: fewer than {GOAL:.0%} are right")


if __name__ == "__main__":
    main()
