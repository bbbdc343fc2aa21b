"""An S3 server in this process, and Django's storage on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import boto3


@contextmanager
def s3_server() -> Iterator[str]:
    """Run a server; gives its address."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def new_bucket(address: str) -> dict[str, Any]:
    """The entry of STORAGES for a new bucket."""
    name = f"quire-{uuid4().hex}"
    bucket(address, name).create()
    options = {"bucket_name": name, "endpoint_url": address, "region_name": "us-east-1"}
    keys = {"access_key": "key", "secret_key": "secret"}
    return {"BACKEND": "storages.backends.s3.S3Storage", "OPTIONS": options | keys}


def bucket(address: str, name: str) -> Any:
    """A bucket as its owner sees it."""
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    session = boto3.resource("s3", endpoint_url=address, region_name="us-east-1", **keys)
    return session.Bucket(name)


def object_names(entry: dict[str, Any]) -> list[str]:
    """Names of all objects of a bucket."""
    options = entry["OPTIONS"]
    objects = bucket(options["endpoint_url"], options["bucket_name"]).objects.all()
    return sorted(item.key for item in objects)
