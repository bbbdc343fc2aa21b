"""The conversation's loop at a terminal (or on a pipe, one question a line)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from config.chat.api import ApiError, ChatApi
from config.chat.conversation import HELP, Conversation

# What a model writes must not steer the terminal: no escapes, only line feed and tab stay.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def safe(text: str) -> str:
    """Text without control characters."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


class Terminal:
    """Reads questions, prints answers as they come."""

    def __init__(
        self,
        api: ChatApi,
        model: str,
        conversation: Conversation,
        sampling: dict[str, Any],
        read: Callable[[str], str] = input,
    ) -> None:
        self.api, self.model, self.talk, self.sampling = api, model, conversation, sampling
        self._read = read
        self._interactive = sys.stdin.isatty()
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda rest: print(HELP),
            "reset": lambda rest: self.talk.reset(),
            "system": lambda rest: self.talk.reset(rest),
            "model": self._choose_model,
        }

    def run(self) -> None:
        """Until /exit, Ctrl-D, or Ctrl-C at the prompt."""
        while True:
            try:
                line = self._read("> " if self._interactive else "").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self.ask(line)

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        command = self._commands.get(name)
        if command is None:
            print(f"There is no /{safe(name)}. /help lists the commands.")
        else:
            command(rest.strip())

    def _choose_model(self, name: str) -> None:
        try:
            names = self.api.models()
        except ApiError as error:
            print(safe(str(error)))
            return
        if name in names:
            self.model = name
            self.talk.reset()
        print("\n".join(f"{'*' if known == self.model else ' '} {known}" for known in names))

    def ask(self, question: str) -> bool:
        """Ask, and print what comes; Ctrl-C keeps what has come so far. False: it went wrong."""
        fine = True
        self.talk.ask(question)
        said: list[str] = []
        pieces = self.api.answer(self.model, self.talk.messages, self.sampling)
        try:
            for piece in pieces:
                said.append(piece)
                print(safe(piece), end="", flush=True)
        except KeyboardInterrupt:
            pieces.close()  # closes the connection, and with it the engine's work
            print(" [stopped]", end="")
        except ApiError as error:
            fine = False
            print(safe(f"\n{error}") if said else safe(str(error)), end="")
        print()
        self.talk.reply("".join(said))
        return fine
