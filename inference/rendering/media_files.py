"""Reads the bytes of a medium's file from its URL, the tenant's stored files, or the disk."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from django.conf import settings

from common.outbound_http import OutboundRequestBlocked, fetch
from engine.contract.errors import InvalidRequest
from engine.multimodal.inputs import path_of_file_url
from inference.rendering.media_sources import MediaSource
from storage.blobs import open_blob


def read_source(source: MediaSource, max_bytes: int | None = None) -> tuple[bytes, bytes]:
    """Return a medium's file and its sha256. Raises `InvalidRequest`.

    `max_bytes`: maximum size of the file (default: that of a request's body).
    """
    limit = max_bytes or settings.QUIRE.max_body_bytes
    if source.data:
        data = source.data
    elif source.file_id:
        data = _read_file(partial(open_blob, source.tenant_id, source.file_id), source.param, limit)
    elif source.url.startswith("data:"):
        data = _decode_data_url(source)
    elif source.url.startswith("file:"):
        path = _local_path(source)
        data = _read_file(lambda: path.open("rb"), source.param, limit)
    else:
        try:
            data = fetch(
                source.url,
                max_bytes=limit,
                timeout_s=settings.QUIRE.media_fetch_timeout_s,
                param=source.param,
                hosts=settings.QUIRE.allowed_media_domains,
            )
        except OutboundRequestBlocked as error:
            raise InvalidRequest(error.message, param=source.param) from error
    return data, hashlib.sha256(data).digest()


def _local_path(source: MediaSource) -> Path:
    """The path of a `file:` URL. Raises `InvalidRequest` unless the operator allows it."""
    folder = settings.QUIRE.allowed_local_media_path
    try:
        if folder is None:
            raise PermissionError
        return path_of_file_url(source.url, folder)
    except PermissionError:
        message = "The file of this address may not be read."
        raise InvalidRequest(message, param=source.param) from None


def _read_file(open_file: Callable[[], IO[bytes]], param: str, limit: int) -> bytes:
    try:
        with open_file() as file:
            data = file.read(limit + 1)
    except OSError:
        raise InvalidRequest("The file no longer exists.", param=param) from None
    if len(data) > limit:
        raise InvalidRequest(f"The file has over {limit} bytes.", param=param)
    return data


def _decode_data_url(source: MediaSource) -> bytes:
    """The bytes of `data:image/png;base64,...`. Raises `InvalidRequest` for anything else."""
    head, comma, data = source.url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise InvalidRequest(
            "A data: address must be data:TYPE;base64, and then the file.",
            param=source.param,
        )
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(
            f"The {source.kind}'s base64 can't be read: {error}.", param=source.param
        ) from None
