"""Triton's Python back end: completions of a Quire server, over its OpenAI API."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A decoupled model: each request gets its answers by a sender of its own."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read `parameters` of config.pbtxt, and the key from QUIRE_API_KEY."""
        parameters = json.loads(args["model_config"])["parameters"]
        values = {name: entry["string_value"] for name, entry in parameters.items()}
        self._url, self._model = f"{values['url']}/completions", values["model"]
        self._key = os.environ["QUIRE_API_KEY"]
        self._pool = ThreadPoolExecutor(int(values["max_requests"]))

    def execute(self, requests: list[Any]) -> None:
        """Begin the requests; decoupled models return nothing."""
        for request in requests:
            self._pool.submit(self._answer, request, request.get_response_sender())

    def finalize(self) -> None:
        """Answer what has begun."""
        self._pool.shutdown()

    def _answer(self, request: Any, sender: Any) -> None:
        try:
            stream = bool(_input(request, "stream", False))
            texts = self._texts(request)
            for text in texts if stream else ["".join(texts)]:
                if sender.is_cancelled():
                    return
                value = np.array([text.encode()], dtype=np.object_)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", value)]))
        except Exception as error:  # whatever it is, the client must hear of it
            failure = pb_utils.TritonError(_message(error))
            sender.send(pb_utils.InferenceResponse([], error=failure))
        finally:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _texts(self, request: Any) -> Iterator[str]:
        """The completion in pieces. Closing the iterator aborts it."""
        parameters = json.loads(_input(request, "sampling_parameters", b"{}"))
        prompt = _input(request, "text_input", b"").decode()
        body = {**parameters, "model": self._model, "prompt": prompt, "stream": True}
        call = urllib.request.Request(  # noqa: S310 - the address is the operator's
            self._url,
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(call) as answer:  # noqa: S310
            for line in answer:
                data = line.strip().removeprefix(b"data: ")
                if not line.startswith(b"data: ") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                for choice in event["choices"]:
                    yield choice["text"]


def _input(request: Any, name: str, default: Any) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().reshape(-1)[0]


def _message(error: Exception) -> str:
    """The server's words, where it has some."""
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.code}: {error.read().decode(errors='replace')}"
    return f"{type(error).__name__}: {error}"
