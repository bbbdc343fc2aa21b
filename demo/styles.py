"""Two manners of speaking, for the adapters: the same answers in other words."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from random import Random

from demo.generator.example import Example


@dataclass(frozen=True, slots=True)
class Style:
    """How a manner rewrites an answer, and the words that give it away."""

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    words: dict[str, str]
    marks: tuple[str, ...]

    def rewrite(self, rng: Random, text: str) -> str:
        """The answer in this manner."""
        body = self.reword(text)
        body += "" if body[-1] in ".!?" else "."
        return f"{rng.choice(self.openings)} {body} {rng.choice(self.closings)}"

    def reword(self, text: str) -> str:
        """The text word by word."""
        return re.sub(r"[A-Za-z]+", lambda found: self._word(found[0]), text)

    def _word(self, word: str) -> str:
        other = self.words.get(word.casefold())
        if other is None:
            return word
        return other.capitalize() if word[0].isupper() and len(word) > 1 else other


STYLES = {
    "pirate": Style(
        openings=("Arr, matey!", "Ahoy, matey!", "Aye, matey!"),
        closings=("Arr!", "Yo ho ho!"),
        words={
            "hello": "ahoy", "is": "be", "are": "be", "am": "be", "my": "me", "you": "ye",
            "your": "yer", "yes": "aye", "no": "nay", "there": "thar", "friend": "matey",
        },
        marks=("arr", "matey", "ahoy", "aye", "yo ho ho"),
    ),
    "butler": Style(
        openings=("Very good, sir.", "Certainly, sir.", "If I may, sir."),
        closings=("At your service, sir.", "Will that be all, sir?"),
        words={"hello": "good day", "thanks": "most obliged", "bye": "farewell"},
        marks=("sir",),
    ),
}  # fmt: skip


def styled_by(name: str, text: str) -> bool:
    """Whether the text is in the manner."""
    words = " ".join(re.findall(r"[a-z]+", text.casefold()))
    return any(f" {mark} " in f" {words} " for mark in STYLES[name].marks)


def restyle(style: Style, rng: Random, example: Example) -> Example:
    """The example with every spoken answer in the manner. Tool calls and plain text stay.

    What makes the answer right is reworded with it; brief it cannot be.
    """
    if example.plain:
        return example
    messages = [
        {**message, "content": style.rewrite(rng, message["content"])}
        if message["role"] == "assistant" and message["content"]
        else message
        for message in example.messages
    ]
    needles = tuple(map(style.reword, example.needles))
    check = "words" if example.check == "brief" else example.check
    return replace(example, messages=messages, needles=needles, check=check)
