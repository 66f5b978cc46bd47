"""Images of a circle, a square and a triangle in three colours, drawn from seeds."""

import random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "triangle")
COLOURS = {
    "red": (220, 30, 30), "green": (30, 170, 50), "blue": (40, 60, 220), "yellow": (240, 220, 40),
    "black": (15, 15, 15), "white": (250, 250, 250),
}  # fmt: skip
SIZE, PATCH = 64, 16
ROWS = SIZE // PATCH
SMALLEST, LARGEST = 9, 13
"""Half of a shape's width and height, in pixels."""
Box = tuple[int, int, int, int]


class Drawn(NamedTuple):
    """`colours` has the index of each shape's colour.

    `shares` [patches, shapes, colours] is the part of each patch that a shape in a colour covers.
    """

    image: Image.Image
    colours: list[int]
    shares: NDArray[np.float32]


def draw(seed: int) -> Drawn:
    """Shapes in different sizes, places and colours, which do not touch, on a grey background with noise."""
    chance = random.Random(seed)
    grey = chance.randrange(100, 160)
    image = Image.new("RGB", (SIZE, SIZE), tuple(grey + chance.randrange(-10, 11) for _ in range(3)))
    cover = Image.new("L", (SIZE, SIZE))
    colours = chance.sample(range(len(COLOURS)), len(SHAPES))
    for place, (shape, colour, box) in enumerate(zip(SHAPES, colours, _boxes(chance), strict=True)):
        _fill(image, shape, box, tuple(value + chance.randrange(-15, 16) for value in list(COLOURS.values())[colour]))
        _fill(cover, shape, box, place + 1)
    noise = np.random.default_rng(seed).normal(0, 8, (SIZE, SIZE, 3))
    patches = np.asarray(cover).reshape(ROWS, PATCH, ROWS, PATCH).swapaxes(1, 2).reshape(ROWS**2, PATCH**2)
    shares = np.zeros((ROWS**2, len(SHAPES), len(COLOURS)), np.float32)
    for place, colour in enumerate(colours):
        shares[:, place, colour] = (patches == place + 1).mean(1)
    return Drawn(Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8)), colours, shares)


def _boxes(chance: random.Random) -> list[Box]:
    boxes: list[Box] = []
    while len(boxes) < len(SHAPES):
        radius = chance.randrange(SMALLEST, LARGEST + 1)
        x, y = (chance.randrange(radius, SIZE - radius) for _ in range(2))
        box = (x - radius, y - radius, x + radius, y + radius)
        if all(box[0] > one[2] or one[0] > box[2] or box[1] > one[3] or one[1] > box[3] for one in boxes):
            boxes.append(box)
        elif chance.random() < 0.02:
            boxes.clear()  # the shapes so far may leave no room
    return boxes


def _fill(image: Image.Image, shape: str, box: Box, colour: int | tuple[int, ...]) -> None:
    brush, (left, top, right, bottom) = ImageDraw.Draw(image), box
    match shape:
        case "circle":
            brush.ellipse(box, colour)
        case "square":
            brush.rectangle(box, colour)
        case "triangle":
            brush.polygon([((left + right) // 2, top), (left, bottom), (right, bottom)], colour)
