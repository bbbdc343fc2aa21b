"""Follow-ups: what the user said earlier in the conversation."""

from __future__ import annotations

from random import Random

from demo.generator import arithmetic, calendar, capitals, greetings, limits
from demo.generator.example import Example, Message, assistant, casual, user
from demo.generator.people import NAMES
from demo.generator.places import CAPITALS, CITIES

COLOURS = ("red", "blue", "green", "yellow", "purple", "orange", "black", "white", "pink", "brown")
ANIMALS = ("cats", "dogs", "horses", "owls", "foxes", "bears", "frogs", "ducks", "wolves", "whales")

# What the user tells, what the model replies, how it is asked back and how it answers.
FACTS: tuple[tuple[tuple[str, ...], str, tuple[str, ...], str, tuple[str, ...]], ...] = (
    (
        ("My name is {}.", "I am {}.", "Hi, I'm {}.", "Hello, my name is {}.", "Call me {}."),
        "Hello, {}! How can I help you?",
        (
            "What is my name?", "What's my name?", "Do you remember my name?", "Who am I?",
            "Can you tell me my name?", "Tell me my name.", "Which name did I tell you?",
        ),
        "Your name is {}.",
        NAMES,
    ),
    (
        ("I live in {}.", "My home is in {}.", "I come from {}.", "I am from {}."),
        "{} sounds like a lovely place!",
        (
            "Where do I live?", "Which city am I from?", "Do you remember where I live?",
            "Where am I from?", "What city do I live in?", "Tell me where I live.",
        ),
        "You live in {}.",
        CITIES,
    ),
    (
        ("My favourite colour is {}.", "I like the colour {}.", "I love the colour {}."),
        "{} is a beautiful colour!",
        (
            "What is my favourite colour?", "Which colour do I like?", "Do you remember my colour?",
            "What colour do I like?", "Tell me my favourite colour.",
        ),
        "Your favourite colour is {}.",
        COLOURS,
    ),
    (
        ("My favourite animals are {}.", "I like {}.", "I love {}."),
        "{} are wonderful animals!",
        (
            "Which animals do I like?", "What are my favourite animals?", "What animals do I love?",
            "Do you remember my favourite animals?", "Tell me which animals I like.",
        ),
        "Your favourite animals are {}.",
        ANIMALS,
    ),
)  # fmt: skip
AND_OF = ("And of {}?", "And {}?", "What about {}?", "And the capital of {}?", "How about {}?")
AND_PLUS = ("And plus {}?", "Add {} to that.", "Plus {}?", "Now add {}.", "And {} more?")
UNTOLD = "You have not told me yet."
BETWEEN = (capitals, arithmetic, calendar, greetings, limits)


def sample(rng: Random) -> Example:
    """A conversation whose last question needs the turns before it."""
    kind = rng.random()
    if kind < 0.5:
        return _recall(rng)
    if kind < 0.6:
        return _untold(rng)
    return _another_capital(rng) if kind < 0.8 else _running_sum(rng)


def _conversation(turns: list[tuple[str, str]]) -> list[Message]:
    return [say(text) for turn in turns for say, text in zip((user, assistant), turn, strict=True)]


def _recall(rng: Random) -> Example:
    tells, reply, asks, answer, values = rng.choice(FACTS)
    value = rng.choice(values)
    told, question = rng.choice(tells).format(value), casual(rng, rng.choice(asks))
    shown = value[0].upper() + value[1:]
    messages = _conversation([(told, reply.format(shown))])
    keys: list[str] = []
    for _ in range(rng.choice((0, 0, 1, 2))):
        other = rng.choice(BETWEEN).sample(rng)
        messages += other.messages
        keys += other.keys
    messages += _conversation([(question, answer.format(value))])
    keys.append(f"{told} {question}")
    return Example("memory", messages, tuple(keys), (value,))


def _untold(rng: Random) -> Example:
    _, _, asks, _, _ = rng.choice(FACTS)
    before = rng.choice(BETWEEN).sample(rng)
    while "help you" in str(before.answer["content"]):  # it may have told a name
        before = rng.choice(BETWEEN).sample(rng)
    question = casual(rng, rng.choice(asks))
    messages = before.messages + _conversation([(question, UNTOLD)])
    keys = (*before.keys, f"{before.keys[0]} {question}")
    return Example("memory", messages, keys, ("not told",))


def _another_capital(rng: Random) -> Example:
    first, second = rng.sample(tuple(CAPITALS), 2)
    before = capitals.forward(first, casual(rng, rng.choice(capitals.FORWARD).format(first)))
    question = casual(rng, rng.choice(AND_OF).format(second))
    after = capitals.forward(second, question)
    keys = (*before.keys, f"{first} {question}")
    return Example("memory", before.messages + after.messages, keys, after.needles)


def _running_sum(rng: Random) -> Example:
    """A sum, and another number added to its result."""
    a, b = rng.randint(0, 60), rng.randint(0, 39)
    before = arithmetic.solve(rng, "+", a, b)
    c = rng.randint(0, arithmetic.LARGEST)
    question = casual(rng, rng.choice(AND_PLUS).format(c))
    messages = before.messages + _conversation([(question, arithmetic.working("+", a + b, c))])
    fact = arithmetic.is_fact("+", a + b, c)
    key = f"{a} + {b} {question}" if fact else arithmetic.pair_key("+", a + b, c)
    keys = (*before.keys, key)
    return Example("memory", messages, keys, (str(a + b + c),), check="number")
