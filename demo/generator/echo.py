"""Saying something after the user: what teaches the model to copy words that it is given."""

from __future__ import annotations

from random import Random

from demo.generator.example import Example, exchange
from demo.generator.people import BOT_NAMES, NAMES
from demo.generator.places import CAPITALS, CITIES
from demo.generator.stories import HEROES, TRAITS
from demo.generator.toolbox import CURRENCIES, KINDS, TASKS, THINGS
from demo.generator.wording import phrases

ASKS = phrases("""
Repeat after me: {} | Repeat: {} | Say: {} | Say {} | Please say {} | Echo {} | Repeat {} |
Can you say {} | Say this: {} | Write {} | Please repeat {} | Say the words {}
""")  # fmt: skip
POOLS = (
    NAMES, BOT_NAMES, CITIES, tuple(CAPITALS), HEROES, TRAITS, THINGS, KINDS, TASKS, CURRENCIES,
)  # fmt: skip


def sample(rng: Random, longest: int = 7) -> Example:
    """Some words to be said again."""
    text = " ".join(_word(rng) for _ in range(rng.randint(1, longest)))
    text = text.lower() if rng.random() < 0.3 else text
    return exchange("echo", rng.choice(ASKS).format(text), text, text)


def _word(rng: Random) -> str:
    return rng.choice(rng.choice(POOLS)) if rng.random() < 0.9 else str(rng.randint(0, 9999))
