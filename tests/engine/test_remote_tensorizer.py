"""Tensorizer files in a bucket and behind HTTP."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from engine import EngineArgs, TensorizerConfig, tensorize_vllm_model
from engine.contract.errors import InvalidRequest, ModelLoadError
from tests.engine.test_load_formats import answer, bare, expected, source

__all__ = ["bare", "expected", "source"]  # fixtures
pytestmark = pytest.mark.system


def load(folder: Path, uri: str, **extra: Any) -> list[int]:
    settings = {"tensorizer_uri": uri, **extra}
    return answer(folder, load_format="tensorizer", model_loader_extra_config=settings)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    monkeypatch.setenv("S3_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("S3_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("S3_SECRET_ACCESS_KEY", "test")
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket="models")
    yield client
    server.stop()


@pytest.mark.slow  # moto's start takes 7 s
def test_a_bucket_holds_what_was_written_there(
    source: Path, bare: Path, expected: list[int], bucket: Any
) -> None:
    config = TensorizerConfig(tensorizer_uri="s3://models/llama/model.tensors")
    written = tensorize_vllm_model(EngineArgs(model=str(source)), config)
    assert written == config.tensorizer_uri
    assert load(bare, str(written)) == expected
    content = bucket.get_object(Bucket="models", Key="llama/model.tensors")["Body"].read()
    bucket.put_object(Bucket="models", Key="cut.tensors", Body=content[: len(content) // 2])
    for name in ("cut.tensors", "none.tensors"):
        with pytest.raises(ModelLoadError, match=rf"s3://models/{name} isn't a sound"):
            load(bare, f"s3://models/{name}")
    with pytest.raises(ModelLoadError, match=r"s3://none/x can't be written: .*exist") as refusal:
        tensorize_vllm_model(EngineArgs(model=str(source)), TensorizerConfig("s3://none/x"))
    assert refusal.value.param == "tensorizer_uri"


class Files(BaseHTTPRequestHandler):
    """Serves a folder's files, and parts of them."""

    protocol_version = "HTTP/1.1"

    def __init__(self, folder: Path, *rest: Any) -> None:
        self._folder = folder
        super().__init__(*rest)

    def do_GET(self) -> None:
        file = self._folder / self.path[1:]
        if not file.is_file():
            self.send_error(404)
            return
        content = file.read_bytes()
        expected_match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if expected_match:
            content = content[
                int(expected_match[1]) : int(expected_match[2]) + 1 if expected_match[2] else None
            ]
        self.send_response(206 if expected_match else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with suppress(ConnectionError):  # who has read enough leaves
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """The address of a file that is served from `tmp_path`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, tmp_path)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield lambda name: f"http://127.0.0.1:{server.server_port}/{name}"
        server.shutdown()
        thread.join()


def test_http_is_read_too(
    source: Path, bare: Path, expected: list[int], tmp_path: Path, page: Callable[[str], str]
) -> None:
    config = TensorizerConfig(tensorizer_uri=str(tmp_path / "model.tensors"))
    tensorize_vllm_model(EngineArgs(model=str(source)), config)
    assert load(bare, page("model.tensors")) == expected
    content = (tmp_path / "model.tensors").read_bytes()
    (tmp_path / "cut.tensors").write_bytes(content[:-100_000])
    for name in ("cut.tensors", "none.tensors"):
        with pytest.raises(ModelLoadError, match=rf"{name} isn't a sound"):
            load(bare, page(name))


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tensorizer_uri": "redis://localhost/x"}, "tensorizer_uri"),
        ({"tensorizer_uri": "http://localhost/x"}, "tensorizer_uri"),
        ({"tensorizer_uri": "s3://models/x", "s3_secret_access_key": "k"}, "s3_secret_access_key"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(
    options: dict[str, str], param: str, source: Path
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        tensorize_vllm_model(EngineArgs(model=str(source)), TensorizerConfig(**options))
    assert refusal.value.param == param
