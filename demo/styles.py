"""Two manners of speaking, for the adapters: the same answers in other words."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from demo.generator.example import Example


@dataclass(frozen=True, slots=True)
class Style:
    """How a manner rewrites an answer, and the words that give it away.

    It comes after the answer, and changes few words in it: with others before or in it so small a
    model forgets what it was going to say.
    """

    closing: str
    words: dict[str, str]
    mark: str

    def rewrite(self, text: str) -> str:
        """The answer in this manner."""
        body = self.reword(text)
        return f"{body}{'' if body[-1] in '.!?' else '.'} {self.closing}"

    def marks_in(self, text: str) -> bool:
        """Whether the text is in this manner."""
        words = " ".join(re.findall(r"[a-z]+", text.casefold()))
        return f" {self.mark} " in f" {words} "

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
        closing="Arr, matey!",
        words={"hello": "ahoy", "yes": "aye", "you": "ye", "your": "yer"},
        mark="arr matey",
    ),
    "butler": Style(
        closing="At your service, sir.",
        words={"hello": "good day", "yes": "indeed"},
        mark="at your service sir",
    ),
}  # fmt: skip


def restyle(style: Style, example: Example) -> Example:
    """The example with every spoken answer in the manner. Tool calls and plain text stay.

    What makes the answer right is reworded with it; brief it cannot be.
    """
    if example.plain:
        return example
    messages = [
        {**message, "content": style.rewrite(message["content"])}
        if message["role"] == "assistant" and message["content"]
        else message
        for message in example.messages
    ]
    needles = tuple(map(style.reword, example.needles))
    check = "words" if example.check == "brief" else example.check
    return replace(example, messages=messages, needles=needles, check=check)
