"""The data directory: an instance's files, readable by its owner alone."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, StreamingHttpResponse
from django.http.response import HttpResponseBase


def make_private(folder: Path) -> Path:
    """Create the folder with mode 0700 if it is missing.

    Raises: ImproperlyConfigured if it can't be created, read and written by this process.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ImproperlyConfigured(
            f"the data dir {folder} can't be made: {error.strerror}. "
            "Name another with --data-dir or QUIRE_DATA_DIR."
        ) from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ImproperlyConfigured(
            f"the data dir {folder} can't be read and written by this user (uid {os.getuid()}). "
            "Change its owner, or name another with --data-dir or QUIRE_DATA_DIR."
        )
    return folder


def write_private(path: Path, text: str) -> None:
    """Write a file atomically with mode 0600: readers see all of it or none."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def secret_key(data_dir: Path) -> str:
    """The instance's secret key, generated once. Concurrent processes get the same one."""
    path = make_private(data_dir) / "secret_key"
    if not path.exists():
        handle, temporary = tempfile.mkstemp(dir=data_dir, prefix=".secret_key.")
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(50))
        try:
            os.link(temporary, path)  # atomic, and fails if another process was first
        except FileExistsError:
            pass
        finally:
            os.unlink(temporary)
    return path.read_text(encoding="ascii").strip()


#: In the data directory while an instance runs: tells `manage.py chat` its address.
INSTANCE_FILE = "instance.json"


def instance_url(data_dir: Path) -> str:
    """URL of the instance that runs in this data directory; "" if none does."""
    try:
        return str(json.loads((data_dir / INSTANCE_FILE).read_text(encoding="utf-8"))["url"])
    except (OSError, ValueError, KeyError):
        return ""


# Public ids of stored objects have 128 random bits, so they can't be guessed.

_SHAPE = re.compile(r"[a-z]+[-_][0-9a-f]{32}")


def new_id(prefix: str) -> str:
    """`prefix` (which ends in "-" or "_") and 32 hexadecimal digits."""
    return prefix + secrets.token_hex(16)


def derived_id(prefix: str, of: str) -> str:
    """A reproducible id. `of` must contain random bits, or the id could be guessed."""
    return prefix + hashlib.sha256(of.encode()).hexdigest()[:32]


def is_id(text: str) -> bool:
    """Whether the text has the form of our ids. Anything else is never looked up."""
    return _SHAPE.fullmatch(text) is not None


def download(
    request: HttpRequest, chunks: Iterable[bytes | str], name: str, media: str
) -> HttpResponseBase:
    """A file response. Under ASGI, Django would read a plain iterator whole before sending it."""
    # Under WSGI, and in tests, it would read an asynchronous one whole.
    asgi = hasattr(request, "scope")
    response = StreamingHttpResponse(
        _iterate_chunks(chunks) if asgi else chunks, content_type=media
    )
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


async def _iterate_chunks(chunks: Iterable[bytes | str]) -> AsyncIterator[bytes | str]:
    iterator = iter(chunks)
    following = sync_to_async(lambda: next(iterator, None))
    while (chunk := await following()) is not None:
        yield chunk
