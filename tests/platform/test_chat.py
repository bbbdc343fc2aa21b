"""The terminal chat against a small server that speaks the API."""

from __future__ import annotations

import json
import readline
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from pydantic import SecretStr

from config.management.commands.chat import find_server
from config.terminal_chat import (
    ApiError,
    ChatApi,
    Conversation,
    Terminal,
    format_statistics,
    input_history,
    safe,
)
from tests.platform.instance import certificate


class Handler(BaseHTTPRequestHandler):
    """Lists two models, and answers with what the server's `replies` say."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        models = getattr(self.server, "models", [{"id": "one"}, {"id": "two"}])
        self._json(200, {"data": models})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.headers.get("Authorization"), body))  # type: ignore[attr-defined]
        reply = self.server.replies.pop(0)  # type: ignore[attr-defined]
        if isinstance(reply, dict):
            self._json(429, reply)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for chunk in reply:
            event = (
                chunk if isinstance(chunk, dict) else {"choices": [{"delta": {"content": chunk}}]}
            )
            self.wfile.write(f": heartbeat\n\ndata: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _json(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen, server.replies = [], []
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def talk(server: Any, *lines: str, **sampling: Any) -> Terminal:
    """A conversation in which the person types these lines."""
    typed = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    terminal = Terminal(ChatApi(server.url, "k"), "one", Conversation(), sampling, read)
    terminal.run()
    terminal.api.close()
    return terminal


def test_answers_stream_and_the_conversation_grows(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies = [["Hel", "lo!"], ["Fine."]]
    talk(server, "Hi", "", "How are you?", temperature=0)
    assert capsys.readouterr().out == "Hello!\nFine.\n\n"
    key, body = server.seen[1]
    assert key == "Bearer k"
    assert (body["model"], body["stream"], body["temperature"]) == ("one", True, 0)
    assert [(m["role"], m["content"]) for m in body["messages"]] == [
        ("user", "Hi"),
        ("assistant", "Hello!"),
        ("user", "How are you?"),
    ]


def test_a_server_that_asks_for_a_client_certificate_gets_it(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.load_verify_locations(cert)
    context.verify_mode = ssl.CERT_REQUIRED
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.replies = [["Hello!"]]
    words = ("chat", "Hi", "--url", f"https://127.0.0.1:{server.server_port}", "--insecure")
    with pytest.raises(CommandError, match="Nothing answers"):
        call_command(*words)
    call_command(*words, "--cert", cert, "--key", key)
    assert capsys.readouterr().out == "Hello!\n"
    both = tmp_path / "both.pem"
    both.write_bytes(Path(cert).read_bytes() + Path(key).read_bytes())
    server.replies = [["Again!"]]
    call_command(*words, "--cert", str(both))
    assert capsys.readouterr().out == "Again!\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--key", "k.pem"), "--key needs --cert"),
        (("--cert", "/no/such.pem"), "--cert /no/such.pem can't be used"),
    ],
)
def test_a_client_certificate_that_cant_be_used_is_one_clear_line(
    words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(CommandError, match=message):
        call_command("chat", "Hi", "--url", "https://127.0.0.1:1", *words)


def test_commands_change_the_conversation(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.replies = [["a"], ["b"], ["c"]]
    talk(server, "x", "/system Be brief.", "y", "/clear", "z", "/system", "/help", "/nonsense")
    assert [m["content"] for m in server.seen[1][1]["messages"]] == ["Be brief.", "y"]
    assert [m["content"] for m in server.seen[2][1]["messages"]] == ["Be brief.", "z"]
    out = capsys.readouterr().out
    assert "/system TEXT" in out
    assert "There is no /nonsense. /help lists the commands." in out


def test_a_misspelt_command_is_answered_with_the_closest(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(server, "/sistem Be brief.", "/exot")
    out = capsys.readouterr().out
    assert "There is no /sistem. Did you mean /system?" in out
    assert "There is no /exot. Did you mean /exit?" in out


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("one \\", "  two\\", "three"), "one \n  two\nthree"),
        (('"""one', "", "  two\\", 'three"""'), "one\n\n  two\\\nthree"),
        (('"""', "/clear", '"""'), "/clear"),
        (('"""one line"""',), "one line"),
        (('"""one', "two"), "one\ntwo"),  # the input ends in it
        (('Say """',), 'Say """'),
    ],
)
def test_a_message_of_several_lines_is_one_message(
    server: Any, lines: tuple[str, ...], message: str
) -> None:
    server.replies = [["a"]]
    talk(server, *lines)
    assert [m["content"] for m in server.seen[0][1]["messages"]] == [message]


def test_a_system_message_of_several_lines(server: Any) -> None:
    server.replies = [["a"]]
    talk(server, "/system Be brief.\\", "Be kind.", "x")
    assert server.seen[0][1]["messages"][0]["content"] == "Be brief.\nBe kind."


def test_ctrl_c_discards_a_message_of_several_lines(server: Any) -> None:
    server.replies = [["a"]]
    typed = iter(("one\\", KeyboardInterrupt(), "two"))

    def read(prompt: str) -> str:
        line = next(typed, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    Terminal(ChatApi(server.url, ""), "one", Conversation(), {}, read).run()
    assert [m["content"] for m in server.seen[0][1]["messages"]] == ["two"]


def test_statistics_follow_an_answer_at_a_terminal_alone(
    server: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = {
        "prompt_tokens": 1200,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1000},
    }
    server.replies = [["Hi", {"choices": [], "usage": usage}]] * 2
    talk(server, "x")
    assert capsys.readouterr().err == ""
    assert server.seen[0][1]["stream_options"] == {"include_usage": True}
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    talk(server, "x")
    assert "[1,200 prompt tokens (1,000 cached), 5 output tokens in " in capsys.readouterr().err


def test_statistics_name_the_rate_after_the_first_token() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 21}
    assert format_statistics(usage, 0.5, 2.5) == (
        "[9 prompt tokens, 21 output tokens in 2.50 s, first after 0.50 s, 10.0 tok/s]"
    )


def test_statistics_of_a_few_tokens_that_came_at_once_name_no_rate() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 9}
    assert "tok/s" not in format_statistics(usage, 0.5, 0.502)


def test_what_was_typed_is_offered_again_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    path = tmp_path / "chat_history"
    path.write_text("older\n")
    readline.clear_history()
    with input_history(path):
        readline.add_history("What is a quire?")
    assert path.read_text() == "older\nWhat is a quire?\n"
    assert path.stat().st_mode & 0o777 == 0o600
    readline.clear_history()
    with input_history(path):
        assert readline.get_history_item(2) == "What is a quire?"
    readline.clear_history()


def test_another_model_starts_a_new_conversation(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies = [["a"], ["b"]]
    terminal = talk(server, "x", "/model two", "y", "/model nope", "/exit", "never said")
    assert (server.seen[1][1]["model"], len(server.seen[1][1]["messages"])) == ("two", 1)
    assert "* two" in capsys.readouterr().out
    assert terminal.model == "two"


def test_a_refusal_is_told_and_its_question_forgotten(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies = [{"error": {"message": "Slow down."}}, ["fine"]]
    talk(server, "x", "y")
    assert "429: Slow down." in capsys.readouterr().out
    assert [m["content"] for m in server.seen[1][1]["messages"]] == ["y"]


def test_an_error_in_the_stream_keeps_what_came(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies = [["part", {"error": {"message": "engine died"}}]]
    terminal = talk(server, "x")
    assert "part\nengine died" in capsys.readouterr().out
    assert terminal.talk.turns[-1] == {"role": "assistant", "content": "part"}


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(
    server: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []

    def answer(*_: object) -> Iterator[str]:
        try:
            yield {"choices": [{"delta": {"content": "half"}}]}
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    terminal = Terminal(ChatApi(server.url, ""), "one", Conversation(), {})
    monkeypatch.setattr(terminal.api, "answer", answer)
    assert terminal.ask("x")
    assert "half [stopped]" in capsys.readouterr().out
    assert closed == [True]
    assert terminal.talk.turns[-1]["content"] == "half"


def test_fault_37_a_model_cannot_steer_the_terminal() -> None:
    assert safe("a\x1b[2J\x9b31mb\x07\r\nc\td\r") == "a�[2J�31mb�\nc\td�"


def test_one_question_on_the_command_line(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.replies = [["Rome."], {"error": {"message": "no"}}]
    call_command("chat", "capital", "of", "Italy?", "--url", server.url, "--api-key", "k")
    assert capsys.readouterr().out == "Rome.\n"
    assert server.seen[0][1]["messages"][0]["content"] == "capital of Italy?"
    with pytest.raises(SystemExit):
        call_command("chat", "again", "--url", server.url)


def test_an_unknown_model_is_refused_with_those_there_are(server: Any) -> None:
    with pytest.raises(CommandError, match="it has one, two"):
        call_command("chat", "x", "--url", server.url, "--model", "three")


def test_a_model_that_is_ready_to_chat_comes_first(server: Any) -> None:
    server.models = [
        {"id": "a-vectors", "tasks": ["embed"]},
        {"id": "b-unloaded", "tasks": None},
        {"id": "c-ready", "tasks": ["generate"]},
    ]
    server.replies = [["Yes."]]
    call_command("chat", "x", "--url", server.url)
    assert server.seen[0][1]["model"] == "c-ready"
    assert ChatApi(server.url, "").models() == ["c-ready", "b-unloaded", "a-vectors"]


def test_a_server_that_is_not_there_is_said_so() -> None:
    with pytest.raises(CommandError, match="Nothing answers at http://127"):
        call_command("chat", "x", "--url", "http://127.0.0.1:9/v1")
    with pytest.raises(ApiError):
        list(ChatApi("http://127.0.0.1:9", "").answer("m", [], {}))


def test_the_data_dirs_key_goes_to_its_own_address_alone(tmp_path: Path, settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(api_key=SecretStr(""))
    with pytest.raises(CommandError, match="No instance runs"):
        find_server(tmp_path, None, None)
    (tmp_path / "instance.json").write_text('{"url": "http://here:1", "api_key": "secret"}')
    assert find_server(tmp_path, None, None) == ("http://here:1", "secret")
    assert find_server(tmp_path, "http://here:1/v1", None)[1] == "secret"
    assert find_server(tmp_path, "http://elsewhere", None)[1] == ""
    assert find_server(tmp_path, "http://elsewhere", "given")[1] == "given"
    settings.QUIRE = settings.QUIRE.replace(api_key=SecretStr("env"))
    assert find_server(tmp_path, None, None)[1] == "env"


def test_pictures_go_with_the_next_question_alone(server: Any, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG")
    server.replies += [["seen"], ["again"]]
    talk(server, f"/image {picture}", "What?", "And now?")
    first, second = (body["messages"][-1]["content"] for _, body in server.seen)
    assert first == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}},
        {"type": "text", "text": "What?"},
    ]
    assert second == "And now?"


def test_a_picture_that_cannot_be_read_is_named(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(server, "/image /nowhere.png")
    assert "/nowhere.png can't be read" in capsys.readouterr().out
    with pytest.raises(CommandError, match=r"--image /nowhere\.png can't be read"):
        call_command("chat", "hello", url=server.url, image=["/nowhere.png"])
