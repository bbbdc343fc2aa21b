"""The chat loop at a terminal (or on a pipe, one question per line)."""

from __future__ import annotations

import base64
import json
import mimetypes
import re
import ssl
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import httpx

from common.files import write_private
from common.rates import decode_tokens_per_s

try:
    import readline
except ImportError:  # Python was built without readline: lines can't be edited
    readline = None  # type: ignore[assignment]


class ApiError(RuntimeError):
    """The server can't be reached or refused the request; the message is shown to the user."""


class ChatApi:
    """Client of a server's chat endpoints."""

    def __init__(self, url: str, api_key: str, *, verify: ssl.SSLContext | bool = True) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(10, read=600),
            verify=verify,
        )

    def close(self) -> None:
        self._client.close()

    def models(self) -> list[str]:
        """Return the names of the key's models, those ready to chat first. Raises `ApiError`."""
        try:
            response = self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise ApiError(f"Nothing answers at {self.url}: {error}") from error
        _check(response)
        data = response.json()["data"]
        # Quire reports a model's task once a replica serves it; other servers don't report it.
        return sorted((str(model["id"]) for model in data), key=_model_ranks(data).__getitem__)

    def answer(
        self, model: str, messages: list[dict[str, Any]], sampling: dict[str, Any]
    ) -> Generator[dict[str, Any]]:
        """Yield an answer's chunks as they arrive, the last with `usage`; closing stops it.

        Raises: `ApiError`.
        """
        body = {"model": model, "messages": messages, "stream": True, **sampling}
        body["stream_options"] = {"include_usage": True}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    _check(response)
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield _parse_chunk(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            raise ApiError(f"The connection to {self.url} broke: {error}") from error


def _parse_chunk(data: str) -> dict[str, Any]:
    """Parse one chunk of the event stream. Raises `ApiError` for an error event."""
    chunk: dict[str, Any] = json.loads(data)
    if "error" in chunk:
        raise ApiError(chunk["error"]["message"])
    return chunk


def _model_ranks(models: list[dict[str, Any]]) -> dict[str, int]:
    """Return the rank of each model: 0 is ready to chat, 1 isn't served yet, 2 can't chat."""
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
/clear        forget the conversation
/model NAME   talk to another model (without NAME: list them)
/help         list the commands
/exit         leave; so does Ctrl-D. Ctrl-C stops an answer.

A question of several lines stands between two \"\"\", or has a \\ at the end of its lines."""

MULTILINE_QUOTE = '"""'


@dataclass
class Conversation:
    """The conversation's messages in OpenAI's format, with the optional system message first."""

    system: str = ""
    turns: list[dict[str, Any]] = field(default_factory=list)
    #: URLs of the images to send with the next question.
    images: list[str] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return all messages to send to the model."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        return [*start, *self.turns]

    def ask(self, text: str) -> None:
        """Add the user's message with the images attached since the last one."""
        content: str | list[dict[str, Any]] = text
        if self.images:
            content = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
            content.append({"type": "text", "text": text})
            self.images = []
        self.turns.append({"role": "user", "content": content})

    def attach(self, path: str) -> None:
        """Attach an image to the next question. Raises OSError for an unreadable file."""
        media_type = mimetypes.guess_type(path)[0] or "image/png"
        data = base64.b64encode(Path(path).expanduser().read_bytes()).decode()
        self.images.append(f"data:{media_type};base64,{data}")

    def reply(self, text: str) -> None:
        """Add the model's answer. If it's empty, remove the question."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def reset(self, system: str | None = None) -> None:
        """Start a new conversation, optionally with another system message."""
        self.turns.clear()
        self.images.clear()
        if system is not None:
            self.system = system


#: File in the data dir with the typed lines, for the arrow keys.
HISTORY_FILE = "chat_history"
MAX_HISTORY_LINES = 1000


@contextmanager
def input_history(path: Path) -> Iterator[None]:
    """Let `input` recall the lines of this and earlier runs; the file's mode is 0600."""
    if readline is None or not sys.stdin.isatty():
        yield
        return
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            readline.add_history(line)
    try:
        yield
    finally:
        save_history(path)


def save_history(path: Path) -> None:
    """Save the last typed lines."""
    last = readline.get_current_history_length()
    first = max(1, last - MAX_HISTORY_LINES + 1)
    lines = [readline.get_history_item(index) or "" for index in range(first, last + 1)]
    # The terminal may have sent bytes that aren't valid UTF-8.
    text = "\n".join(lines).encode(errors="replace").decode()
    try:
        write_private(path, f"{text}\n")
    except OSError as error:
        print(f"The history can't be written to {path}: {error.strerror}.", file=sys.stderr)


# A model's output must not control the terminal: only line feed and tab are allowed.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def safe(text: str) -> str:
    """Remove control characters from the text."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


class Terminal:
    """Reads questions and prints answers as they arrive."""

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
        self._is_interactive = sys.stdin.isatty()
        #: Description of the last answer's tokens and times; "" if the server reports no usage.
        self.statistics = ""
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda rest: print(HELP),
            "image": self._attach,
            "clear": lambda rest: self.talk.reset(),
            "system": lambda rest: self.talk.reset(rest),
            "model": self._choose_model,
        }

    def run(self) -> None:
        """Run until /exit, Ctrl-D, or Ctrl-C at the prompt."""
        while True:
            try:
                line = self._read_line("> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if line in ("/exit", "/quit"):
                return
            text = self._read_message(line)
            if line.startswith("/"):
                self._command(text)
            elif text:
                self.ask(text)
                if self._is_interactive and self.statistics:
                    print(self.statistics, file=sys.stderr)

    def _read_message(self, line: str) -> str:
        """Read the rest of a message from its first line; return "" if Ctrl-C discards it."""
        lines, is_quoted = [line], line.startswith(MULTILINE_QUOTE)
        try:
            if is_quoted:
                lines[0] = line.removeprefix(MULTILINE_QUOTE)
                while not lines[-1].endswith(MULTILINE_QUOTE):
                    lines.append(self._read_line("... ").rstrip())
                lines[-1] = lines[-1].removesuffix(MULTILINE_QUOTE)
            while not is_quoted and lines[-1].endswith("\\"):
                lines[-1] = lines[-1].removesuffix("\\")
                lines.append(self._read_line("... ").rstrip())
        except EOFError:
            print()  # Ctrl-D, or the end of a pipe, also ends the message
        except KeyboardInterrupt:
            print()
            return ""
        return "\n".join(lines).strip()

    def _read_line(self, prompt: str) -> str:
        return self._read(prompt if self._is_interactive else "")

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        command = self._commands.get(name)
        if command is None:
            matches = get_close_matches(name, [*self._commands, "exit"], n=1)
            suggestion = f"Did you mean /{matches[0]}?" if matches else "/help lists the commands."
            print(f"There is no /{safe(name)}. {suggestion}")
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
        """Ask and print the answer; Ctrl-C keeps the part received. Return False on an error."""
        fine = True
        self.talk.ask(question)
        self.statistics = ""
        output: list[str] = []
        started = time.perf_counter()
        first_token_at: float | None = None
        chunks = self.api.answer(self.model, self.talk.messages, self.sampling)
        try:
            for chunk in chunks:
                for choice in chunk.get("choices", []):
                    delta = choice["delta"]
                    if delta.get("content") or delta.get("reasoning_content"):
                        first_token_at = first_token_at or time.perf_counter()
                    if text := delta.get("content"):
                        output.append(text)
                        print(safe(text), end="", flush=True)
                if usage := chunk.get("usage"):
                    now = time.perf_counter()
                    self.statistics = format_statistics(
                        usage, (first_token_at or now) - started, now - started
                    )
        except KeyboardInterrupt:
            chunks.close()  # closes the connection, which stops generation in the engine
            print(" [stopped]", end="")
        except ApiError as error:
            fine = False
            print(safe(f"\n{error}") if output else safe(str(error)), end="")
        print()
        self.talk.reply("".join(output))
        return fine


def format_statistics(usage: dict[str, Any], first_token_s: float, total_s: float) -> str:
    """Describe the API's `usage` and the times of an answer in one line."""
    num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    cached = f" ({num_cached:,} cached)" if num_cached else ""
    num_tokens = usage["completion_tokens"]
    # The time to the first token belongs to the prompt.
    tokens_per_s = decode_tokens_per_s(num_tokens, total_s - first_token_s)
    rate = "" if tokens_per_s is None else f", {tokens_per_s:,.1f} tok/s"
    return (
        f"[{usage['prompt_tokens']:,} prompt tokens{cached}, {num_tokens:,} output tokens"
        f" in {total_s:.2f} s, first after {first_token_s:.2f} s{rate}]"
    )
