"""What has been said, and the commands that change it."""

from __future__ import annotations

from dataclasses import dataclass, field

HELP = """\
/system TEXT  set the system message and start anew (without TEXT: remove it)
/reset        forget the conversation
/model NAME   talk to another model (without NAME: list them)
/help         this
/exit         leave; so does Ctrl-D. Ctrl-C stops an answer."""


@dataclass
class Conversation:
    """Messages in OpenAI's form; the system message, if any, comes first."""

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        """All that the model gets."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        return [*start, *self.turns]

    def ask(self, text: str) -> None:
        """The person said something."""
        self.turns.append({"role": "user", "content": text})

    def reply(self, text: str) -> None:
        """The model said something. An empty answer takes the question with it."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def reset(self, system: str | None = None) -> None:
        """Start anew, with another system message if one is given."""
        self.turns.clear()
        if system is not None:
            self.system = system
