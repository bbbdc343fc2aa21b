"""Object storage (S3, Google Cloud, Azure) through Django's storage API, if configured.

It is `STORAGES["objects"]`. Objects never change: writing an existing name writes the same bytes.
Without object storage everything stays in folders, and nothing here is called.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.files import File
from django.core.files.storage import Storage, storages
from tqdm.utils import CallbackIOWrapper

from common.errors import ServiceUnavailable

ALIAS = "objects"
#: Prefix of temporary files.
PARTIAL = ".upload-"
#: Lifetime of a presigned URL in seconds: clients follow the redirect at once.
URL_LIFETIME_S = 300


def has_object_storage() -> bool:
    return ALIAS in settings.STORAGES


#: Called with the size of each chunk read.
OnBytes = Callable[[int], object]


def upload_object(name: str, path: Path, on_bytes: OnBytes | None = None) -> None:
    """Store a file under a name, replacing an existing object.

    Raises: `ServiceUnavailable`.
    """
    with _storage(reads=False) as storage, path.open("rb") as file:
        storage.delete(name)  # some back ends would choose another name for a duplicate
        content = CallbackIOWrapper(on_bytes, file) if on_bytes else file
        saved = storage.save(name, File(content))
        if saved != name:
            storage.delete(saved)
            raise ServiceUnavailable(f"The object storage stored {name} as {saved}.")


def download_object(name: str, target: Path) -> None:
    """Write an object to a path atomically, mode 0600.

    Raises: FileNotFoundError; `ServiceUnavailable`; OSError if the disk can't store it.
    """
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=PARTIAL)
    try:
        with os.fdopen(handle, "wb") as file, _storage() as storage, storage.open(name) as source:
            shutil.copyfileobj(source, file)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_object(name: str) -> bytes:
    """The bytes of a small object. Raises FileNotFoundError, `ServiceUnavailable`."""
    with _storage() as storage, storage.open(name) as source:
        content: bytes = source.read()
    return content


def delete_object(name: str) -> None:
    """Delete an object if it exists. Raises `ServiceUnavailable`."""
    with _storage() as storage:
        storage.delete(name)


def list_objects(folder: str) -> tuple[list[str], list[str]]:
    """Names of the folders and objects directly in a folder. Raises `ServiceUnavailable`."""
    with _storage() as storage:
        try:
            folders, names = storage.listdir(folder)
        except FileNotFoundError:
            return [], []
    # Azure's back end has no folders: it lists the full names of everything below.
    paths = [name.removeprefix(f"{folder}/").partition("/") for name in names]
    inner = {first for first, slash, _ in paths if slash}
    objects = {first for first, slash, _ in paths if not slash}
    return sorted({*folders, *inner} - {""}), sorted(objects - {""})


def delete_folder(folder: str) -> None:
    """Delete all objects below a folder. Raises `ServiceUnavailable`."""
    folders, objects = list_objects(folder)
    for name in objects:
        delete_object(f"{folder}/{name}")
    for name in folders:
        delete_folder(f"{folder}/{name}")


def modified_at(name: str) -> datetime:
    """When an object was last written. Raises FileNotFoundError, `ServiceUnavailable`."""
    with _storage() as storage:
        return storage.get_modified_time(name)


def presigned_url(name: str, disposition: str) -> str | None:
    """A presigned URL of the object, valid for `URL_LIFETIME_S`; None if unsupported here.

    Args:
        disposition: the response's Content-Disposition.
    """
    if not (has_object_storage() and settings.QUIRE.presigned_downloads):
        return None
    backend, content_type = settings.STORAGES[ALIAS]["BACKEND"], "application/octet-stream"
    options: dict[str, Any] = {"expire": URL_LIFETIME_S}
    if "GoogleCloud" in backend:
        parameters = {"response_disposition": disposition, "response_type": content_type}
        options = {"parameters": parameters | {"expiration": timedelta(seconds=URL_LIFETIME_S)}}
    elif "Azure" in backend:
        options["parameters"] = {"content_disposition": disposition, "content_type": content_type}
    else:
        options["parameters"] = {
            "ResponseContentDisposition": disposition,
            "ResponseContentType": content_type,
        }
    with _storage() as storage:
        url: str = storage.url(name, **options)
    return url


@contextmanager
def _storage(*, reads: bool = True) -> Iterator[Storage]:
    """The back end. Its errors become `ServiceUnavailable`, or FileNotFoundError if an object that
    is read is missing.
    """
    try:
        yield storages[ALIAS]
    except (OSError, ServiceUnavailable):
        raise
    except Exception as error:  # each back end has its own hierarchy of errors
        if reads and _is_missing(error):
            raise FileNotFoundError(str(error)) from error
        raise ServiceUnavailable(
            f"The object storage is unavailable ({type(error).__name__}). Try again later."
        ) from error


def _is_missing(error: Exception) -> bool:
    """Whether a back end's error means that the object doesn't exist (Azure, Google Cloud, S3)."""
    if isinstance(response := getattr(error, "response", None), dict):
        return response.get("Error", {}).get("Code") in ("404", "NoSuchKey")
    return HTTPStatus.NOT_FOUND in (getattr(error, name, None) for name in ("status_code", "code"))


def trim_cache(folder: Path, max_bytes: int) -> None:
    """Remove a cache's least recently used files until the rest fits.

    Args:
        folder: the cache, with its files one level below.
    """
    entries = []
    for path in folder.glob("*/*"):
        if "." not in path.name:  # skip partial files and journals
            try:
                facts = path.stat()
            except FileNotFoundError:  # another process trims the cache too
                continue
            entries.append((facts.st_mtime, facts.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries)[:-1]:
        if total <= max_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size
