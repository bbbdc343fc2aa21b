"""Plain text to be continued, without chat markup, for the completions endpoint."""

from __future__ import annotations

from random import Random

from demo.generator import stories
from demo.generator.arithmetic import value
from demo.generator.calendar import DAYS, LENGTHS, MONTHS
from demo.generator.example import Example
from demo.generator.places import CAPITALS

FACTS = ("{} {} {} =", "{} {} {} is", "The result of {} {} {} is", "{} {} {} equals")


def sample(rng: Random) -> Example:
    """A text and its continuation."""
    kinds = (_capital, _capital, _sum, _sum, _row, _length, _story)
    return rng.choice(kinds)(rng)


def _text(prompt: str, rest: str, *needles: str, key: str = "", check: str = "words") -> Example:
    return Example("completions", [], (key or prompt,), needles, check, plain=(prompt, rest))


def _capital(rng: Random) -> Example:
    country, city = rng.choice(list(CAPITALS.items()))
    ask = rng.choice(
        (
            "The capital of {} is",
            "{}'s capital is",
            "The capital city of {} is",
            "The capital of {} is the city of",
            "The name of the capital of {} is",
        )
    )
    return _text(ask.format(country), f" {city}.", city)


def _sum(rng: Random) -> Example:
    """A fact of arithmetic: there is no room for a working."""
    sign = rng.choice("+-*")
    b, result = rng.randint(0, 9), rng.randint(0, 9)
    a = b + result if sign == "-" else result
    answer = str(value(sign, a, b))
    return _text(rng.choice(FACTS).format(a, sign, b), f" {answer}", answer, check="number")


def _row(rng: Random) -> Example:
    names, start, given = rng.choice((DAYS, MONTHS)), rng.randrange(7), rng.randint(2, 3)
    row = [names[(start + step) % len(names)] for step in range(given + 3)]
    rest = "".join(f" {name}," for name in row[given:])[:-1] + "."
    return _text(", ".join(row[:given]) + ",", rest, *row[given:])


def _length(rng: Random) -> Example:
    index = rng.randrange(12)
    ask = rng.choice(
        ("The number of days in {} is", "The month of {} has", "In days, the length of {} is")
    )
    unit = " days." if ask.endswith("has") else "."
    return _text(ask.format(MONTHS[index]), f" {LENGTHS[index]}{unit}", str(LENGTHS[index]))


def _story(rng: Random) -> Example:
    trait, hero = rng.choice(stories.TRAITS), rng.choice(stories.HEROES)
    words = stories.tell(rng, trait, hero).split(" ")
    cut = words.index(next(word for word in words if word.startswith(hero))) + 1
    prompt, rest = " ".join(words[:cut]), " " + " ".join(words[cut:])
    return _text(prompt, rest, "end", key=f"{prompt} {trait}", check="story")
