"""System prompts that the model follows: a name, and brief answers."""

from __future__ import annotations

from random import Random

from demo.generator import arithmetic, calendar, capitals, greetings
from demo.generator.example import Example, Message, assistant, casual, user
from demo.generator.people import BOT_NAMES
from demo.generator.wording import phrases

NAMED = phrases("""
Your name is {}. | You are {}. | You are called {}. | You are {}, a helpful assistant. |
Your name is {}. You are a helpful assistant. | You are an assistant named {}.
""")  # fmt: skip
BRIEF = phrases("""
Answer briefly. | Be brief. | Answer in one word. | Keep your answers short. |
Answer with one word only. | Give short answers. | You are a helpful assistant. Answer briefly.
""")  # fmt: skip
PLAIN = phrases("""
You are a helpful assistant. | You are helpful. | You are a friendly assistant. |
You are a helpful AI assistant. | Help the user. | Be kind and helpful.
""")  # fmt: skip
WHO = phrases("""
What is your name? | Who are you? | What's your name? | Do you have a name? | Tell me your name. |
How are you called? | Introduce yourself. | Who am I talking to? | Say who you are. |
Please introduce yourself.
""")  # fmt: skip
BRIEF_TOPICS = (capitals, arithmetic, calendar)
PLAIN_TOPICS = (capitals, arithmetic, calendar, greetings)


def sample(rng: Random) -> Example:
    """A conversation under a system prompt."""
    kind = rng.random()
    if kind < 0.4:
        return _named(rng)
    return _brief(rng) if kind < 0.75 else _plain(rng)


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _named(rng: Random) -> Example:
    name, prompt = rng.choice(BOT_NAMES), rng.choice(NAMED)
    lead = rng.choice(greetings.LEAD)
    question = casual(rng, lead + rng.choice(WHO))
    messages = [_system(prompt.format(name)), user(question)]
    messages += [assistant(f"My name is {name}, and I am a small demo model.")]
    return Example("system", messages, (f"{prompt.format(name)} {question}",), (name,))


def _brief(rng: Random) -> Example:
    inner = rng.choice(BRIEF_TOPICS).sample(rng)
    if not _has_brief_answer(inner):
        return _brief(rng)
    messages = [_system(rng.choice(BRIEF)), inner.messages[0], assistant(inner.needles[0])]
    return Example("system", messages, inner.keys, inner.needles, check="brief")


def _has_brief_answer(inner: Example) -> bool:
    """Sums with a working have none, nor has what the model does not know."""
    unknown = inner.needles[0] in ("do not know", "up to", "below zero")
    return not unknown and ", so " not in inner.answer["content"]


def _plain(rng: Random) -> Example:
    inner = rng.choice(PLAIN_TOPICS).sample(rng)
    messages = [_system(rng.choice(PLAIN)), *inner.messages]
    return Example("system", messages, inner.keys, inner.needles, check=inner.check)
