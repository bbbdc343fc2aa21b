"""`S3Store`: KV blocks in an S3-compatible object store."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import NamedTuple
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from engine.contract.errors import ConfigError
from engine.kv_transfer.remote_tier import TIMEOUT_S, RemoteStore, StoreError

#: A bucket may hold other things, which are never deleted.
_RECORD_NAME = re.compile(r"([0-9a-f]{8})/([0-9a-f]{64})\.kv")
_SECRET = "secret"
#: The bucket is listed, and the oldest records are deleted, whenever a 32nd of the capacity was
#: written; so much is kept free.
_NUM_PARTS = 32
#: Maximum objects deleted by one request.
_MAX_DELETED = 1000


class _Listed(NamedTuple):
    """A record in a bucket's list. `owner`: hexadecimal."""

    written_at: datetime
    name: str
    owner: str
    key: bytes
    size: int


class S3Store(RemoteStore):
    """Records as objects of a bucket, below a prefix.

    S3 doesn't say when an object was read: of the owner with the most bytes, what was written first
    is deleted first, so that none can push out what others have within an equal share. Each replica
    counts what it has written alone, so N of them may be over the capacity by N parts of 32 less
    the one that is kept free.
    """

    def __init__(self, url: str, capacity: int) -> None:
        """`url`: s3://BUCKET/PREFIX. Endpoint, region and credentials are boto3's, from AWS's
        variables and files.

        Raises `ConfigError` for a URL without a bucket, and where there is no region.
        """
        parts = urlsplit(url)
        if not parts.netloc or parts.query or parts.fragment:
            raise ConfigError(
                f"kv_offloading_backend must be s3://BUCKET/PREFIX; got {url!r}.",
                param="kv_offloading_backend",
            )
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        if self._prefix:
            self._prefix += "/"
        self._capacity = capacity
        self._unlisted_bytes = capacity  # the first record makes it list the bucket
        self._used_bytes = 0
        self._lock = threading.Lock()
        try:
            self._client = boto3.client(
                "s3",
                config=Config(
                    connect_timeout=TIMEOUT_S,
                    read_timeout=TIMEOUT_S,
                    retries={"total_max_attempts": 1},
                    # Not all compatible stores know these; blocks have their own.
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                ),
            )
        except BotoCoreError as error:
            raise ConfigError(
                f"kv_offloading_backend={url!r} can't be used: {error}",
                param="kv_offloading_backend",
            ) from error

    def get(self, key: bytes, owner: bytes) -> bytes | None:
        return self._get_object(self._name(key, owner))

    def contains(self, key: bytes, owner: bytes) -> bool:
        with _store_errors():
            try:
                self._client.head_object(Bucket=self._bucket, Key=self._name(key, owner))
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey"):
                    return False
                raise
            return True

    def set(self, key: bytes, owner: bytes, record: bytes) -> None:
        with self._lock:
            self._unlisted_bytes += len(record)
            is_due = self._unlisted_bytes * _NUM_PARTS > self._capacity
        if is_due:
            self._make_space(len(record))
        with _store_errors():
            name = self._name(key, owner)
            self._client.put_object(Bucket=self._bucket, Key=name, Body=record)
        with self._lock:
            self._used_bytes += len(record)

    def delete(self, key: bytes, owner: bytes) -> None:
        with _store_errors():
            self._client.delete_object(Bucket=self._bucket, Key=self._name(key, owner))

    def records(self) -> Iterator[tuple[bytes, bytes]]:
        with _store_errors():
            for listed in self._list():
                if (record := self._get_object(listed.name)) is not None:  # deleted meanwhile
                    yield listed.key, record

    def clear(self) -> int:
        with _store_errors():
            names = [listed.name for listed in self._list()]
            self._delete_objects(names)
        return len(names)

    def get_secret(self, new_secret: bytes) -> bytes:
        name = self._prefix + _SECRET
        if (secret := self._get_object(name)) is not None:
            return secret
        try:
            with _store_errors():
                self._client.put_object(
                    Bucket=self._bucket, Key=name, Body=new_secret, IfNoneMatch="*"
                )
        except StoreError as error:
            # Another replica may have been first.
            if (secret := self._get_object(name)) is None:
                raise error
            return secret
        return new_secret

    def read_used_bytes(self) -> int:
        return self._used_bytes

    def close(self) -> None:
        self._client.close()

    def _name(self, key: bytes, owner: bytes) -> str:
        return f"{self._prefix}{owner.hex()}/{key.hex()}.kv"

    def _get_object(self, name: str) -> bytes | None:
        with _store_errors():
            try:
                response = self._client.get_object(Bucket=self._bucket, Key=name)
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") == "NoSuchKey":
                    return None
                raise
            body: bytes = response["Body"].read()
            return body

    def _list(self) -> Iterator[_Listed]:
        pages = self._client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix):
            for entry in page.get("Contents", ()):
                name = entry["Key"]
                if match := _RECORD_NAME.fullmatch(name.removeprefix(self._prefix)):
                    owner, key = match[1], bytes.fromhex(match[2])
                    yield _Listed(entry["LastModified"], name, owner, key, entry["Size"])

    def _delete_objects(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), _MAX_DELETED):
            objects = [{"Key": name} for name in names[start : start + _MAX_DELETED]]
            response = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects})
            if errors := response.get("Errors"):
                raise StoreError(f"{len(errors)} records can't be deleted: {errors[0]}")

    def _make_space(self, num_bytes: int) -> None:
        """Delete records, so that a part of the capacity, or `num_bytes`, is free."""
        with _store_errors():
            owned: dict[str, list[_Listed]] = {}
            owner_bytes = Counter[str]()
            for listed in sorted(self._list(), reverse=True):  # the oldest last
                owned.setdefault(listed.owner, []).append(listed)
                owner_bytes[listed.owner] += listed.size
            used = owner_bytes.total()
            limit = self._capacity - max(num_bytes, self._capacity // _NUM_PARTS)
            names: list[str] = []
            while used > limit:
                owner = owner_bytes.most_common(1)[0][0]
                oldest = owned[owner].pop()
                owner_bytes[owner] -= oldest.size
                used -= oldest.size
                names.append(oldest.name)
            self._delete_objects(names)
        with self._lock:
            self._unlisted_bytes, self._used_bytes = 0, used


@contextmanager
def _store_errors() -> Iterator[None]:
    """Within it boto3's errors become `StoreError`."""
    try:
        yield
    except (BotoCoreError, ClientError, HTTPError, OSError) as error:
        raise StoreError(f"{type(error).__name__}: {error}") from error
