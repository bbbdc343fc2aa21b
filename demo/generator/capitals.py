"""Capitals of countries, asked both ways."""

from __future__ import annotations

from random import Random

from demo.generator.example import Example, casual, exchange
from demo.generator.places import CAPITALS, UNKNOWN_LANDS
from demo.generator.wording import phrases

FORWARD = phrases("""
What is the capital of {}? | What's the capital of {}? | Which city is the capital of {}? |
Tell me the capital of {}. | Name the capital of {}. | Capital of {}? |
Do you know the capital of {}? | Can you tell me the capital of {}? |
What is the capital city of {}? | I need the capital of {}. | {}: what is its capital? |
Please tell me what the capital of {} is. | What city is {}'s capital? |
What would be the capital of {}? | Could you name the capital of {}?
""")  # fmt: skip
BACKWARD = phrases("""
{} is the capital of which country? | Which country has {} as its capital? |
What country is {} the capital of? | Of which country is {} the capital? |
Tell me which country {} is the capital of. | Name the country whose capital is {}.
""")  # fmt: skip


def sample(rng: Random) -> Example:
    """A question about a capital, or about a land that has none."""
    kind = rng.random()
    if kind < 0.03:
        return _unknown(rng)
    country, city = rng.choice(list(CAPITALS.items()))
    if kind < 0.75:
        return forward(country, casual(rng, rng.choice(FORWARD).format(country)))
    question = casual(rng, rng.choice(BACKWARD).format(city))
    return exchange("capitals", question, f"{city} is the capital of {country}.", country)


def forward(country: str, question: str) -> Example:
    """The capital of a country, whatever the wording."""
    city = CAPITALS[country]
    return exchange("capitals", question, f"The capital of {country} is {city}.", city)


def _unknown(rng: Random) -> Example:
    land = rng.choice(UNKNOWN_LANDS)
    question = casual(rng, rng.choice(FORWARD).format(land))
    answer = f"I am only a small demo model, and I do not know the capital of {land}."
    return exchange("capitals", question, answer, "do not know")
