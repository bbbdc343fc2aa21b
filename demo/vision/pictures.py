"""Pictures with questions about them: digits that people wrote, words, shapes, charts, photographs.

Digits and photographs are scikit-learn's; the font is Pillow's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from string import ascii_uppercase

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from demo.generator.splits import held_out

Color = tuple[int, int, int]

COLORS: dict[str, Color] = {
    "red": (214, 39, 40),
    "green": (40, 150, 60),
    "blue": (40, 80, 210),
    "yellow": (240, 205, 30),
    "orange": (250, 130, 20),
    "purple": (130, 50, 160),
    "black": (15, 15, 15),
}
PAPER: tuple[Color, ...] = ((255, 255, 255), (245, 240, 225), (225, 235, 245), (230, 230, 230))
WORDS = (
    "CAT DOG SUN MOON STAR TREE FISH BIRD HOUSE BOOK CAKE DOOR GOLD HAND KING LAMP MILK NOSE RAIN",
    "ROAD SHIP SNOW WIND WOLF YES NO HELLO STOP GO OPEN EXIT SALE HOT COLD TEA APPLE BREAD QUIRE",
)
MAX_LETTERS = 5
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
PHOTOS = {"china.jpg": "a temple", "flower.jpg": "a flower"}
#: Asked of any picture.
GENERAL = (
    "What is this?", "What do you see?", "Describe the picture.", "What is in this picture?",
    "What's this?", "Describe this image.",
)  # fmt: skip
#: The answer where no picture was shown.
NO_PICTURE = "I answer questions about pictures. Show me a digit, a word, a shape or a chart."


Letters = list[tuple[str, tuple[float, float, float, float]]]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture and what may be asked about it.

    Attributes:
        questions: (question, answer); the first is one of `GENERAL`.
        letters: those of a word, each with its left, top, right and bottom, from 0 to 1.
    """

    kind: str
    image: Image.Image
    questions: list[tuple[str, str]]
    letters: Letters


def draw(kind: str, rng: Random, split: str = "train") -> Picture:
    """A picture of this kind. `split`: "test" for digits and letters that training never shows."""
    image, general, particular, letters = KINDS[kind](rng, split)
    return Picture(kind, image, [(rng.choice(GENERAL), general), *particular], letters)


Drawn = tuple[Image.Image, str, list[tuple[str, str]], Letters]


def _digit(rng: Random, split: str) -> Drawn:
    images, labels = _digits(split)
    index = rng.randrange(len(labels))
    ink, paper = _ink(rng), rng.choice(PAPER)
    if rng.random() < 0.3:
        ink, paper = paper, ink
    size = rng.randint(32, 72)
    mask = Image.fromarray(images[index]).resize((size, size), Image.Resampling.BICUBIC)
    side = round(size * rng.uniform(1.0, 1.3))
    canvas = Image.new("RGB", (side, side), paper)
    canvas.paste(ink, (rng.randint(0, side - size), rng.randint(0, side - size)), mask)
    digit = labels[index]
    questions = ("Which digit is it?", "What number is this?", "Which digit is this?")
    return canvas, f"This is the digit {digit}.", [(rng.choice(questions), f"It is {digit}.")], []


@cache
def _digits(split: str) -> tuple[np.ndarray, list[int]]:
    from sklearn.datasets import load_digits

    data = load_digits()
    held = np.arange(len(data.target)) % 10 == 0
    chosen = held if split == "test" else ~held
    pixels = (data.images[chosen] * 255 / 16).round().astype(np.uint8)
    return pixels, data.target[chosen].tolist()


def _word(rng: Random, split: str) -> Drawn:
    return _written(rng.choice(" ".join(WORDS).split()), rng)


def _letters(rng: Random, split: str) -> Drawn:
    while True:
        word = "".join(rng.choices(ascii_uppercase, k=rng.randint(1, MAX_LETTERS)))
        if held_out(word) == (split == "test"):
            return _written(word, rng)


def _written(word: str, rng: Random) -> Drawn:
    font = ImageFont.load_default(rng.randint(20, 40))
    left, top, right, bottom = font.getbbox(word)
    width, height = int(right - left), int(bottom - top)
    # A word keeps some of its breadth: the model sees a square.
    canvas_width = round(width * rng.uniform(1.05, 1.3)) + 4
    canvas_height = max(height + 4, round(rng.uniform(0.4, 1.0) * canvas_width))
    canvas = Image.new("RGB", (canvas_width, canvas_height), rng.choice(PAPER))
    x = rng.randint(1, canvas_width - width - 1) - left
    y = rng.randint(1, canvas_height - height - 1) - top
    ImageDraw.Draw(canvas).text((x, y), word, fill=_ink(rng), font=font)
    ends = [x + font.getlength(word[:index]) for index in range(len(word) + 1)]
    above, below = (y + top) / canvas_height, (y + bottom) / canvas_height
    letters = [
        (letter, (start / canvas_width, above, end / canvas_width, below))
        for letter, start, end in zip(word, ends, ends[1:])
    ]
    questions = ("What does it say?", "Read it.", "Read the word.", "What is written here?")
    answer = f'It says "{word}".'
    return canvas, f'This is the word "{word}".', [(rng.choice(questions), answer)], letters


def _shape(rng: Random, split: str) -> Drawn:
    name, shape = rng.choice(list(COLORS)), rng.choice(SHAPES)
    side = rng.randint(48, 120)
    canvas = Image.new("RGB", (side, side), rng.choice(PAPER))
    radius = side * rng.uniform(0.28, 0.42)
    x, y = (rng.uniform(radius + 2, side - radius - 2) for _ in range(2))
    _draw_shape(ImageDraw.Draw(canvas), shape, x, y, radius, _shade(COLORS[name], rng))
    shapes = ("What shape is it?", "Which shape is this?", "What shape is this?")
    colors = ("What colour is it?", "What color is it?", "Which colour is this?")
    article = "an" if name[0] == "o" else "a"
    return (
        canvas,
        f"This is {article} {name} {shape}.",
        [
            (rng.choice(shapes), f"It is a {shape}."),
            (rng.choice(colors), f"It is {name}."),
        ],
        [],
    )


def _draw_shape(
    pen: ImageDraw.ImageDraw, shape: str, x: float, y: float, radius: float, color: Color
) -> None:
    def corners(count: int, turn: float, inner: float = 1.0) -> list[tuple[float, float]]:
        points = []
        for index in range(count):
            length = radius * (inner if index % 2 else 1.0)
            angle = turn + 2 * math.pi * index / count
            points.append((x + length * math.cos(angle), y + length * math.sin(angle)))
        return points

    box = (x - radius, y - radius, x + radius, y + radius)
    up = -math.pi / 2
    if shape == "circle":
        pen.ellipse(box, fill=color)
    elif shape == "ring":
        pen.ellipse(box, outline=color, width=max(3, round(radius * 0.3)))
    elif shape == "square":
        pen.polygon(corners(4, math.pi / 4), fill=color)
    elif shape == "triangle":
        pen.polygon(corners(3, up), fill=color)
    elif shape == "star":
        pen.polygon(corners(10, up, 0.42), fill=color)
    else:
        arm = radius * 0.32
        pen.rectangle((x - radius, y - arm, x + radius, y + arm), fill=color)
        pen.rectangle((x - arm, y - radius, x + arm, y + radius), fill=color)


def _chart(rng: Random, split: str) -> Drawn:
    count, side = rng.randint(2, 4), rng.randint(60, 120)
    canvas = Image.new("RGB", (side, side), rng.choice(PAPER))
    pen = ImageDraw.Draw(canvas)
    names = rng.sample([name for name in COLORS if name != "black"], count)
    heights = rng.sample([0.25, 0.4, 0.55, 0.7, 0.9], count)
    base, step = side * 0.92, side * 0.86 / count
    for index, (name, height) in enumerate(zip(names, heights, strict=True)):
        left = side * 0.09 + index * step
        top = base - height * side * 0.85
        pen.rectangle((left, top, left + step * 0.7, base), fill=_shade(COLORS[name], rng))
    pen.line((side * 0.05, base, side * 0.97, base), fill=(60, 60, 60), width=max(1, side // 60))
    tallest, lowest = names[int(np.argmax(heights))], names[int(np.argmin(heights))]
    return (
        canvas,
        f"This is a chart with {count} bars. The tallest is {tallest}.",
        [
            ("How many bars are there?", f"There are {count} bars."),
            ("Which bar is the tallest?", f"The tallest is {tallest}."),
            ("Which bar is the lowest?", f"The lowest is {lowest}."),
        ],
        [],
    )


def _photo(rng: Random, split: str) -> Drawn:
    name = rng.choice(list(PHOTOS))
    photo = _sample_photo(name)
    side = round(min(photo.size) * rng.uniform(0.6, 1.0))
    left, top = rng.randint(0, photo.width - side), rng.randint(0, photo.height - side)
    cut = photo.crop((left, top, left + side, top + side))
    what = f"This is a photograph of {PHOTOS[name]}."
    return cut, what, [(rng.choice(("Is this a photograph?", "What does it show?")), what)], []


@cache
def _sample_photo(name: str) -> Image.Image:
    from sklearn.datasets import load_sample_image

    # What training needs is small: a quarter of the sides is read faster.
    return Image.fromarray(load_sample_image(name)).reduce(4)


KINDS: dict[str, Callable[[Random, str], Drawn]] = {
    "digit": _digit,
    "word": _word,
    "letters": _letters,
    "shape": _shape,
    "chart": _chart,
    "photograph": _photo,
}


def stream(seed: int) -> Iterator[Picture]:
    """Pictures of all kinds without end; letters, which are hardest, most often."""
    rng = Random(seed)
    while True:
        (kind,) = rng.choices(list(KINDS), weights=(4, 1.5, 3.5, 1.5, 1.5, 0.3))
        yield draw(kind, rng)


def _ink(rng: Random) -> Color:
    return _shade(rng.choice(list(COLORS.values())[:3] + [COLORS["black"]] * 3), rng)


def _shade(color: Color, rng: Random) -> Color:
    red, green, blue = (max(0, min(255, value + rng.randint(-18, 18))) for value in color)
    return red, green, blue
