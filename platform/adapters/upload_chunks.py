"""Chunks of uploads in the object storage: any gateway may receive the next one, or join them.

A chunk is an object `adapter-uploads/<upload>/<file>/<begin>-<end>`, in bytes of the file.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from common import object_storage

#: Folder of the object storage.
OBJECTS = "adapter-uploads"


def received_bytes(public_id: str, file: str) -> int:
    """Contiguous bytes received of a file. Raises `ServiceUnavailable`."""
    return max((end for _, end in _chunks(public_id, file)), default=0)


def add_chunk(public_id: str, file: str, begin: int, content: Path) -> None:
    """Store the bytes of a file from `begin` on. Raises `ServiceUnavailable`, OSError."""
    if num_bytes := content.stat().st_size:
        name = f"{_folder(public_id, file)}/{begin:020}-{begin + num_bytes:020}"
        object_storage.upload_object(name, content)


def join_chunks(public_id: str, file: str, target: Path) -> None:
    """Write a file of an upload. Raises `ServiceUnavailable`, OSError."""
    chunk = target.with_name(f"{target.name}.chunk")
    with target.open("wb") as joined:
        for name, _ in _chunks(public_id, file):
            object_storage.download_object(name, chunk)
            with chunk.open("rb") as content:
                shutil.copyfileobj(content, joined)
    chunk.unlink(missing_ok=True)


def upload_ids() -> list[str]:
    """Uploads that have chunks. Raises `ServiceUnavailable`."""
    return object_storage.list_objects(OBJECTS)[0]


def remove_chunks(public_id: str) -> None:
    """Remove an upload's chunks. Raises `ServiceUnavailable`."""
    object_storage.delete_folder(f"{OBJECTS}/{public_id}")


def _folder(public_id: str, file: str) -> str:
    return f"{OBJECTS}/{public_id}/{file}"


def _chunks(public_id: str, file: str) -> list[tuple[str, int]]:
    """Chunks of a file in order, each with the offset of its end.

    If gateways received several from the same offset concurrently, the longest.
    """
    folder, by_begin = _folder(public_id, file), dict[int, tuple[str, int]]()
    for name in object_storage.list_objects(folder)[1]:  # ordered, so that the longest is last
        begin, end = map(int, name.split("-"))
        by_begin[begin] = (f"{folder}/{name}", end)
    chunks, size = list[tuple[str, int]](), 0
    while size in by_begin:
        chunks.append(by_begin[size])
        size = chunks[-1][1]
    return chunks
