"""The conversation's loop at a terminal (or on a pipe, one question a line)."""

from __future__ import annotations

import base64
import json
import mimetypes
import re
import ssl
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx


class ApiError(RuntimeError):
    """The server can't be reached, or refused: the message is for the person."""


class ChatApi:
    """A server's chat endpoints."""

    def __init__(self, url: str, api_key: str, *, verify: ssl.SSLContext | bool = True) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(10, read=600),
            verify=verify,
        )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def models(self) -> list[str]:
        """Names of the models of the key, those that can chat now first. Raises `ApiError`."""
        try:
            response = self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise ApiError(f"Nothing answers at {self.url}: {error}") from error
        _check(response)
        data = response.json()["data"]
        # Quire says what a model is for as soon as a replica serves it; others say nothing.
        return sorted((str(model["id"]) for model in data), key=_model_ranks(data).__getitem__)

    def answer(
        self, model: str, messages: list[dict[str, Any]], sampling: dict[str, Any]
    ) -> Generator[str]:
        """Yield an answer's text as it comes; closing stops it. Raises `ApiError`."""
        body = {"model": model, "messages": messages, "stream": True, **sampling}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    _check(response)
                for line in response.iter_lines():
                    yield from _text_chunks(line)
        except httpx.HTTPError as error:
            raise ApiError(f"The connection to {self.url} broke: {error}") from error


def _text_chunks(line: str) -> Iterator[str]:
    """The text in one line of the event stream."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise ApiError(event["error"]["message"])
    for choice in event.get("choices", []):
        if text := choice["delta"].get("content"):
            yield text


def _model_ranks(models: list[dict[str, Any]]) -> dict[str, int]:
    """Rank of each model: 0 can chat now, 1 isn't served yet, 2 isn't for chats."""
    ranks = {}
    for model in models:
        tasks = model.get("tasks", ["generate"])
        ranks[str(model["id"])] = 1 if tasks is None else 0 if "generate" in tasks else 2
    return ranks


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:300] or response.reason_phrase
    raise ApiError(f"{response.status_code}: {message}")


HELP = """\
/system TEXT  set the system message and start anew (without TEXT: remove it)
/image FILE   show a picture with the next question
/reset        forget the conversation
/model NAME   talk to another model (without NAME: list them)
/help         this
/exit         leave; so does Ctrl-D. Ctrl-C stops an answer."""


@dataclass
class Conversation:
    """Messages in OpenAI's form; the system message, if any, comes first."""

    system: str = ""
    turns: list[dict[str, Any]] = field(default_factory=list)
    #: Addresses of the pictures that go with the next question.
    images: list[str] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All that the model gets."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        return [*start, *self.turns]

    def ask(self, text: str) -> None:
        """The person said something, with the pictures that were attached since the last time."""
        content: str | list[dict[str, Any]] = text
        if self.images:
            content = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
            content.append({"type": "text", "text": text})
            self.images = []
        self.turns.append({"role": "user", "content": content})

    def attach(self, path: str) -> None:
        """Show a picture with the next question. Raises OSError for a file that can't be read."""
        media_type = mimetypes.guess_type(path)[0] or "image/png"
        data = base64.b64encode(Path(path).expanduser().read_bytes()).decode()
        self.images.append(f"data:{media_type};base64,{data}")

    def reply(self, text: str) -> None:
        """The model said something. An empty answer takes the question with it."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def reset(self, system: str | None = None) -> None:
        """Start anew, with another system message if one is given."""
        self.turns.clear()
        self.images.clear()
        if system is not None:
            self.system = system


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
            "image": self._attach,
            "reset": lambda rest: self.talk.reset(),
            "system": lambda rest: self.talk.reset(rest),
            "model": self._choose_model,
        }

    def run(self) -> None:
        """Run until /exit, Ctrl-D, or Ctrl-C at the prompt."""
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

    def _attach(self, path: str) -> None:
        try:
            self.talk.attach(path)
        except OSError as error:
            print(safe(f"{path or 'FILE'} can't be read: {error.strerror}"))

    def _choose_model(self, name: str) -> None:
        try:
            names = self.api.models()
        except ApiError as error:
            print(safe(str(error)))
            return
        if name in names:
            self.model = name
            self.talk.reset()
        print(
            "\n".join(
                f"{'*' if name_of_model == self.model else ' '} {name_of_model}"
                for name_of_model in names
            )
        )

    def ask(self, question: str) -> bool:
        """Ask, and print what comes; Ctrl-C keeps what has come so far. False: it went wrong."""
        fine = True
        self.talk.ask(question)
        output: list[str] = []
        deltas = self.api.answer(self.model, self.talk.messages, self.sampling)
        try:
            for delta in deltas:
                output.append(delta)
                print(safe(delta), end="", flush=True)
        except KeyboardInterrupt:
            deltas.close()  # closes the connection, and with it the engine's work
            print(" [stopped]", end="")
        except ApiError as error:
            fine = False
            print(safe(f"\n{error}") if output else safe(str(error)), end="")
        print()
        self.talk.reply("".join(output))
        return fine
