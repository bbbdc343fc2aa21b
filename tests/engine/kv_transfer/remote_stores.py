"""A Redis and an S3 server for tests, and what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from moto.server import ThreadedMotoServer

from engine.system.redis_client import sync_client
from tests.services import running_redis

BUCKET = "kv-blocks"


class RedisRecords:
    """The records of a Redis by their names there."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client: Any = sync_client(url)

    def names(self) -> list[str]:
        return [key.hex() for key in self.client.keys(b"quire:kv:" + 32 * b"?")]

    def get(self, name: str) -> bytes:
        return self.client.get(bytes.fromhex(name))

    def set(self, name: str, record: bytes) -> None:
        self.client.set(bytes.fromhex(name), record)

    def delete(self, name: str) -> None:
        self.client.delete(bytes.fromhex(name))

    def set_secret(self, secret: bytes) -> None:
        self.client.set("quire:kv:secret", secret)

    def clear(self) -> None:
        self.client.flushall()


class S3Records:
    """The records of a bucket by their names there."""

    def __init__(self) -> None:
        self.url = f"s3://{BUCKET}/some/where"
        self.client: Any = boto3.client("s3")
        self.client.create_bucket(Bucket=BUCKET)
        self.clear()  # all of a process's servers have the same buckets

    def names(self) -> list[str]:
        entries = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", ())
        return [entry["Key"] for entry in entries if entry["Key"].endswith(".kv")]

    def get(self, name: str) -> bytes:
        return self.client.get_object(Bucket=BUCKET, Key=name)["Body"].read()

    def set(self, name: str, record: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=name, Body=record)

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=name)

    def set_secret(self, secret: bytes) -> None:
        self.set("some/where/secret", secret)

    def clear(self) -> None:
        entries = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", ())
        for entry in entries:
            self.delete(entry["Key"])


Records = RedisRecords | S3Records


@contextmanager
def running_s3() -> Iterator[None]:
    """A server that boto3 finds as long as the block lasts."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        try:
            yield
        finally:
            server.stop()


@contextmanager
def running_store(kind: str, folder: Path) -> Iterator[Records]:
    """A server of the kind redis or s3."""
    if kind == "redis":
        with running_redis(folder) as url:
            assert urlsplit(url).scheme in ("redis", "unix")
            yield RedisRecords(url)
    else:
        with running_s3():
            yield S3Records()
