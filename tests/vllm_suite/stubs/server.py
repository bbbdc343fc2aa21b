"""Stands in for vLLM's `tests/utils.py`: its servers are names under which the product serves.

Copied into the tree that the tests run in; the product is told of by the environment.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from typing import Any

import anthropic
import httpx
import openai
import pytest
import requests

URL = os.environ["QUIRE_SUITE_URL"]
KEY = os.environ["QUIRE_SUITE_KEY"]
#: What tests send to a server that asks for no key.
NO_KEY = "EMPTY"
ROOT = os.environ["QUIRE_SUITE_ROOT"]
#: Flags of `vllm serve` that matter to a model's answers, and have a value.
PASSED_ON = (
    "--max-model-len",
    "--max-logprobs",
    "--tool-call-parser",
    "--reasoning-parser",
    "--max-lora-rank",
    "--max-cpu-loras",
    "--pooler-config",
)
#: Those of encoders alone: the demo model keeps its own.
PASSED_ON_POOLING = ("--chat-template",)
SWITCHES = ("--enable-sleep-mode", "--enable-lora")
#: Tokens of context of the models that stand in.
POOLING = bool(os.environ.get("QUIRE_SUITE_POOLING"))
CONTEXT = 512 if POOLING else 2048
ROCM_EXTRA_ARGS: list[str] = []
ROCM_ENV_OVERRIDES: dict[str, str] = {}
VLLM_PATH = ROOT


#: What a test's own server has as `--api-key`: there the test sends it, or doesn't.
_server_keys: list[str] = []


def _with_key(headers: Any) -> dict[str, str]:
    client = dict(headers or {})
    if _server_keys:
        presented_key = client.get("Authorization", "").removeprefix("Bearer ")
        if presented_key in _server_keys:
            client["Authorization"] = f"Bearer {KEY}"
    elif not any(name.lower() in ("authorization", "x-api-key") for name in client):
        client["Authorization"] = f"Bearer {KEY}"
    return client


def _send_key() -> None:
    """The tests' servers ask for no key; ours always does."""
    baseline_request = requests.Session.request

    def request(self: Any, method: str, url: str, **options: Any) -> Any:
        options["headers"] = _with_key(options.get("headers"))
        return baseline_request(self, method, url, **options)

    requests.Session.request = request  # type: ignore[method-assign]
    for kind in (httpx.Client, httpx.AsyncClient):
        build = kind.build_request

        def built(self: Any, *args: Any, _build: Any = build, **options: Any) -> Any:
            response = _build(self, *args, **options)
            if not {"authorization", "x-api-key"} & set(response.headers):
                response.headers["Authorization"] = f"Bearer {KEY}"
            return response

        kind.build_request = built  # type: ignore[method-assign, assignment]
    for client in (openai.OpenAI, openai.AsyncOpenAI):
        make = client.__init__

        def init_with_server(self: Any, *args: Any, _make: Any = make, **options: Any) -> None:
            if options.get("api_key") == NO_KEY:
                options["api_key"] = KEY
            _make(self, *args, **options)

        client.__init__ = init_with_server  # type: ignore[method-assign]


_send_key()


def _manage(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{arguments}: {done.stdout}{done.stderr}")


#: Models that are served, with their flags and by how many servers at a time.
_served: dict[str, tuple[list[str], int]] = {}


def _serve(name: str, flags: list[str]) -> None:
    """Two servers of one name are one here if they'd answer alike, or else refused."""
    running, servers = _served.get(name, (flags, 0))
    if servers and running != flags:
        raise RuntimeError(f"{name} is served already, with {running} and not {flags}.")
    if not servers:
        source = os.environ["QUIRE_SUITE_MODEL"]
        try:
            _manage("load_model", source, "--name", name, "--wait", *flags)
        except BaseException:
            _manage("unload_model", name, "--wait")
            raise
    _served[name] = (flags, servers + 1)


def _let_go(name: str) -> None:
    flags, servers = _served.pop(name)
    if servers > 1:
        _served[name] = (flags, servers - 1)
    else:
        _manage("unload_model", name, "--wait")


def _flags(arguments: list[str]) -> list[str]:
    words = [part for word in map(str, arguments) for part in word.split("=", 1)]
    flags = [word for word in words if word in SWITCHES]
    passed_on = PASSED_ON + (PASSED_ON_POOLING if POOLING else ())
    # Given twice, the last one counts.
    named = {word: value for word, value in itertools.pairwise(words) if word in passed_on}
    flags += [part for pair in named.items() for part in pair]
    # The model that is served, and the product, have no more.
    for flag, limit in (("--max-model-len", CONTEXT), ("--max-logprobs", 1000)):
        if flag in flags:
            value = flags.index(flag) + 1
            flags[value] = str(min(limit, int(flags[value])))
    return flags


def _words_of(flag: str, words: list[str]) -> list[str]:
    values, reading = [], False
    for word in map(str, words):
        if word.startswith("-"):
            reading = word == flag
        elif reading:
            values.append(word)
    return values


def _load_adapter(word: str, model: str) -> None:
    """A word of `--lora-modules`, by the route that does the same on a running server."""
    name, _, path = word.partition("=")
    if word.startswith("{"):
        described = json.loads(word)
        name, path = described["name"], described["path"]
    if not os.path.isdir(path):  # a repository of the hub
        path = os.path.join(ROOT, "demo", "adapters", "pirate")
    body = {"lora_name": name, "lora_path": path, "model": model}
    reply = requests.post(f"{URL}/v1/load_lora_adapter", json=body, timeout=120)
    if reply.status_code != 200:
        raise RuntimeError(reply.text)


class RemoteOpenAIServer:
    """The product, serving the model that the suite runs with under another name."""

    DUMMY_API_KEY = KEY

    def __init__(self, model: str, vllm_serve_args: Any = (), **_: Any) -> None:
        serve_args = list(vllm_serve_args)
        self.uds = None
        self.host, _, port = URL.removeprefix("http://").partition(":")
        self.port = int(port)
        names = _words_of("--served-model-name", serve_args) or [model]
        self._loaded: list[str] = []
        try:
            for name in names:
                _serve(name, _flags(serve_args))
                self._loaded.append(name)
            for word in _words_of("--lora-modules", serve_args):
                _load_adapter(word, names[0])
        except BaseException:
            self.__exit__()
            raise
        _server_keys[:] = _words_of("--api-key", serve_args)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        """A server that ends takes its adapters along; the product keeps them."""
        _server_keys.clear()
        last = {name for name in self._loaded if _served[name][1] == 1}
        listed = requests.get(f"{URL}/v1/models", timeout=120).json()["data"]
        for entry in listed:
            if entry.get("parent") in last:
                requests.post(
                    f"{URL}/v1/unload_lora_adapter", json={"lora_name": entry["id"]}, timeout=120
                )
        for name in self._loaded:
            _let_go(name)

    @property
    def url_root(self) -> str:
        """Without a path."""
        return URL

    def url_for(self, *parts: str) -> str:
        """A path below it."""
        return "/".join([URL, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's SDK."""
        options = {"timeout": 120, **options}
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=KEY, max_retries=0, **options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """The same, asynchronous."""
        options = {"timeout": 120, **options}
        return openai.AsyncOpenAI(
            base_url=self.url_for("v1"), api_key=KEY, max_retries=0, **options
        )

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        """Anthropic's SDK."""
        return anthropic.Anthropic(
            **{"base_url": URL, "api_key": KEY, "max_retries": 0, "timeout": 120, **options}
        )

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        """The same, asynchronous."""
        return anthropic.AsyncAnthropic(
            **{"base_url": URL, "api_key": KEY, "max_retries": 0, "timeout": 120, **options}
        )


RemoteLaunchRenderServer = RemoteOpenAIServer


def __getattr__(name: str) -> Any:
    """Whatever else a test file wants of vLLM's helpers is about GPUs and processes."""
    if name.startswith("__"):
        raise AttributeError(name)

    def mark(*args: Any, **_: Any) -> Any:
        skip = pytest.mark.skip(reason=f"needs vLLM itself: tests.utils.{name}")
        return skip(args[0]) if args and callable(args[0]) else skip

    return mark
