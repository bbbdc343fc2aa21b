"""How long one large body makes everybody else's streams stand still.

python -m tests.inference.bench.gaps [--repeats 5] [--only NAME;...] [--engine]

One stream gets a token every 5 ms from a replica without a model; with `--engine`, one a step from
the demo model. Beside it, over and over, one body of just under the limit of 10 MiB is sent, whose
client leaves after 20 s; shown is the longest gap in the stream meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.inference import live
from tests.inference.bench import ROOT

SIZE = (10 << 20) - 4096
PACE_MS = 5.0
LEAVES_AFTER_S, MAX_TOKENS = 20.0, 30_000
DEMO = ROOT / "demo" / "model"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def _chat(content: Any, **more: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": content}],
    } | more


def _text(size: int = SIZE) -> str:
    return ("All work and no play makes a dull text. " * (size // 40 + 1))[:size]


def _tools(count: int, properties: int) -> list[dict[str, Any]]:
    schema = {
        "type": "object",
        "properties": {f"p{n}": {"type": "string"} for n in range(properties)},
    }
    return [
        {"type": "function", "function": {"name": f"f{n}", "parameters": schema}}
        for n in range(count)
    ]


def _described(count: int) -> list[dict[str, Any]]:
    tools = _tools(count, 3)
    for tool in tools:
        tool["function"]["description"] = _text(SIZE // count - 300)
    return tools


def _forced(tools: list[dict[str, Any]]) -> dict[str, Any]:
    return _chat("hi", tools=tools, tool_choice="required")


def _messages(count: int) -> list[dict[str, str]]:
    text = _text(SIZE // count - 64)
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n in range(count)]


#: Name -> path and body.
BODIES: dict[str, Callable[[], tuple[str, Any]]] = {
    "one text": lambda: (CHAT, _chat(_text())),
    "escapes": lambda: (CHAT, _chat("\n\u00e9" * (SIZE // 8))),
    "newlines": lambda: (CHAT, _chat("\n" * (SIZE // 2))),
    "quotes": lambda: (CHAT, _chat('"' * (SIZE // 2))),
    "other script": lambda: (CHAT, _chat("\u4e2d\u6587" * (SIZE // 12))),
    "8,000 messages": lambda: (CHAT, _chat("") | {"messages": _messages(8000)}),
    "16,000 parts": lambda: (
        CHAT,
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}] * 8000},
                {"role": "user", "content": [{"type": "text", "text": "a"}] * 8000},
            ],
        },
    ),
    "480,000 token ids": lambda: (
        COMPLETIONS,
        {"model": "m", "prompt": list(range(100, 580)) * 1000},
    ),
    "2,048 prompts": lambda: (
        COMPLETIONS,
        {"model": "m", "max_tokens": 1, "prompt": [_text(SIZE // 2048 - 8)] * 2048},
    ),
    "128 tools described": lambda: (
        CHAT,
        _chat("hi", tools=_described(128), tool_choice="required"),
    ),
    "128 tools of 120": lambda: (CHAT, _chat("hi", tools=_tools(128, 120), tool_choice="required")),
    "schema of 12,000": lambda: (
        CHAT,
        _chat(
            "hi",
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "s",
                    "schema": _tools(1, 12_000)[0]["function"]["parameters"],
                },
            },
        ),
    ),
    "a long enum": lambda: (
        CHAT,
        _chat(
            "hi",
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "s",
                    "schema": {"enum": [f"value {n}" for n in range(400_000)]},
                },
            },
        ),
    ),
    "logit_bias": lambda: (CHAT, _chat("hi", logit_bias={str(n): 1 for n in range(49_000)})),
    "stop": lambda: (CHAT, _chat("hi", stop=["x" * 20] * 400_000)),
    "unknown field": lambda: (CHAT, _chat("hi", unknown=[[1] * 100] * 4_000)),
    "metadata": lambda: (CHAT, _chat("hi", metadata={str(n): "x" for n in range(49_000)})),
    "empty objects": lambda: (CHAT, _chat("hi", messages=[{}] * 3_400_000)),
    "template kwargs": lambda: (
        CHAT,
        _chat("hi", chat_template_kwargs={"x": [{"a": "b"}] * 16_000}),
    ),
    "documents": lambda: (CHAT, _chat("hi", documents=[{"text": "x" * 100}] * 16_000)),
    "responses, one text": lambda: (
        "/v1/responses",
        {"model": "m", "input": _text(), "max_output_tokens": 1, "store": False},
    ),
    "responses, items": lambda: (
        "/v1/responses",
        {"model": "m", "input": _messages(8000), "store": False},
    ),
    "messages, one text": lambda: ("/v1/messages", _chat(_text())),
    "messages, 8,000": lambda: ("/v1/messages", _chat("") | {"messages": _messages(8000)}),
    "8,000 embeddings": lambda: ("/v1/embeddings", {"model": "m", "input": [_text(1200)] * 8000}),
    "2,048 embeddings": lambda: (
        "/v1/embeddings",
        {"model": "m", "input": [_text(SIZE // 2048 - 8)] * 2048},
    ),
    "tokenize": lambda: ("/tokenize", {"model": "m", "prompt": _text()}),
    "detokenize": lambda: ("/detokenize", {"model": "m", "tokens": [100] * 480_000}),
}


class Listener:
    """A stream, read in a thread: when each piece of it came."""

    def __init__(self, port: int, key: str) -> None:
        body = json.dumps(
            {
                "model": "m",
                "stream": True,
                "prompt": "hi",
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
            }
        )
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(head(COMPLETIONS, key, len(body)) + body.encode())
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while self._socket.recv(65536):
            self.times.append(time.perf_counter())

    def longest(self, since: float, until: float) -> float:
        """Milliseconds."""
        times = [one for one in list(self.times) if since - 0.05 <= one <= until]
        return 1000 * max(b - a for a, b in itertools.pairwise(times))

    def close(self) -> None:
        """Leave."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


def head(path: str, key: str, length: int) -> bytes:
    """Of a request with a body."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def _send(port: int, key: str, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and answer."""
    with socket.create_connection(("127.0.0.1", port)) as sender:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before its end
            sender.sendall(head(path, key, len(body)) + body)
        answer, until = b"", time.monotonic() + LEAVES_AFTER_S
        with contextlib.suppress(TimeoutError):
            while True:
                sender.settimeout(max(0.01, until - time.monotonic()))
                if not (part := sender.recv(65536)):
                    break
                answer += part
    return int(answer[9:12] or 0), answer


def measure(port: int, key: str, name: str, repeats: int) -> dict[str, Any]:
    """The longest gaps beside one kind of body."""
    path, value = BODIES[name]() if name in BODIES else ("", None)
    body = json.dumps(value, separators=(",", ":")).encode()
    gaps, status, answer, took = [], 0, b"", []
    for _ in range(repeats):
        listener = Listener(port, key)
        time.sleep(0.5)
        began = time.perf_counter()
        if path:
            status, answer = _send(port, key, path, body)
        took.append(time.perf_counter() - began)
        time.sleep(0.3)
        gaps.append(listener.longest(began, time.perf_counter()))
        listener.close()
    return {
        "body": name,
        "bytes": len(body),
        "status": status,
        "gap_ms_median": round(statistics.median(gaps)),
        "gap_ms_most": round(max(gaps)),
        "took_ms": round(1000 * statistics.median(took)),
        "answer": answer.partition(b"\r\n\r\n")[2][:100].decode(errors="replace"),
    }


def replica_command(of: live.Instance, *, engine: bool) -> list[str]:
    """What serves the model "m"."""
    if engine:
        folder = shutil.copytree(DEMO, of.folder / "demo")
        config = json.loads((folder / "config.json").read_text())
        config["max_position_embeddings"] = 2 * MAX_TOKENS  # its words don't matter
        (folder / "config.json").write_text(json.dumps(config))
        flags = ["--replica-id", "r", "--model", str(folder), "--served-model-name", "m"]
        return [sys.executable, "-m", "engine.serving", "--redis-url", of.redis_url, *flags]
    module = "tests.inference.bench.instant_replica"
    flags = ["--model-name", "m", "--model-path", str(of.model_folder), "--pace-ms", str(PACE_MS)]
    return [sys.executable, "-m", module, "--redis-url", of.redis_url, *flags]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--engine", action="store_true")
    args = parser.parse_args()
    names = args.only.split(";") if args.only else ["nothing", *BODIES]
    with (
        tempfile.TemporaryDirectory(prefix="q-", dir="/tmp") as folder,
        live.instance(Path(folder)) as of,
        live.process(replica_command(of, engine=args.engine), of.environment),
        live.gateway(of, "uvicorn") as (port, _),
    ):
        for name in names:
            print(json.dumps(measure(port, of.key, name, args.repeats)), flush=True)


if __name__ == "__main__":
    main()
