"""The few calls of the OpenAI API that a chat needs."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
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
        return sorted((str(model["id"]) for model in data), key=_places(data).__getitem__)

    def answer(
        self, model: str, messages: list[dict[str, str]], sampling: dict[str, Any]
    ) -> Iterator[str]:
        """The pieces of an answer as they come; closing stops it. Raises `ApiError`."""
        body = {"model": model, "messages": messages, "stream": True, **sampling}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    _check(response)
                for line in response.iter_lines():
                    yield from _pieces(line)
        except httpx.HTTPError as error:
            raise ApiError(f"The connection to {self.url} broke: {error}") from error


def _pieces(line: str) -> Iterator[str]:
    """The text in one line of the event stream."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise ApiError(event["error"]["message"])
    for choice in event.get("choices", []):
        if text := choice["delta"].get("content"):
            yield text


def _places(models: list[dict[str, Any]]) -> dict[str, int]:
    """Where each model belongs: 0 can chat now, 1 nothing serves it yet, 2 does other work."""
    found = {}
    for model in models:
        tasks = model.get("tasks", ["generate"])
        found[str(model["id"])] = 1 if tasks is None else 0 if "generate" in tasks else 2
    return found


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:300] or response.reason_phrase
    raise ApiError(f"{response.status_code}: {message}")
