"""The multipart form of an upload."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest
from django.http.multipartparser import MultiPartParserError

from engine.contract.errors import InvalidRequest
from inference.errors import PayloadTooLarge, UnsupportedMediaType
from inference.settings import gateway_settings

#: What a file may be for. Others of OpenAI's are refused by name.
PURPOSES = ("batch",)
OTHER_PURPOSES = ("assistants", "evals", "fine-tune", "user_data", "vision")
MIN_LIFETIME_S, MAX_LIFETIME_S = 3600, 30 * 24 * 3600
FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})


@dataclass
class UploadForm:
    """A checked form. `lifetime_s`: seconds until the file expires, or None."""

    file: UploadedFile
    purpose: str
    lifetime_s: int | None


@contextmanager
def upload_form(request: HttpRequest) -> Iterator[UploadForm]:
    """Parse the body; the file's temporary copy is gone behind the block. Blocks on the disk.

    Raises: `UnsupportedMediaType`, `PayloadTooLarge`, `InvalidRequest` with the field.
    """
    if request.content_type != "multipart/form-data":
        raise UnsupportedMediaType("A file is uploaded as multipart/form-data.")
    try:
        fields, files = request.POST, request.FILES
    except MultiPartParserError as error:
        raise InvalidRequest(f"The form can't be read: {error}", code="invalid_form") from None
    try:
        yield _checked(fields, files)
    finally:
        for _, parts in files.lists():
            for part in parts:
                part.close()


def _checked(fields: Any, files: Any) -> UploadForm:
    for name in sorted({*fields.keys(), *files.keys()} - FIELDS - {"file"}):
        raise InvalidRequest(
            f"Unrecognized request argument supplied: {name[:100]}.",
            param=name[:100],
            code="unknown_parameter",
        )
    parts = files.getlist("file")
    if len(parts) != 1:
        raise InvalidRequest(
            f"The form must hold one file in the field 'file', got {len(parts)}.", param="file"
        )
    size, limit = parts[0].size, gateway_settings().max_file_bytes
    if not size:
        raise InvalidRequest("The file is empty.", param="file")
    if size > limit:
        raise PayloadTooLarge(f"The file has {size} bytes; the limit is {limit}.", param="file")
    return UploadForm(parts[0], checked_purpose(fields.get("purpose")), _lifetime(fields))


def checked_purpose(given: str | None) -> str:
    """A file's purpose. Raises `InvalidRequest`."""
    if given in PURPOSES:
        return str(given)
    if given in OTHER_PURPOSES:
        raise InvalidRequest(f"The purpose {given!r} is not supported.", param="purpose")
    raise InvalidRequest(
        "Missing required parameter: 'purpose'."
        if not given
        else f"{given[:50]!r} isn't a purpose. Use 'batch'.",
        param="purpose",
    )


def _lifetime(fields: Any) -> int | None:
    anchor, text = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and text is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(
            "expires_after.anchor must be 'created_at'.", param="expires_after.anchor"
        )
    seconds = int(text) if text and text.isascii() and text.isdigit() and len(text) < 12 else 0
    if not MIN_LIFETIME_S <= seconds <= MAX_LIFETIME_S:
        raise InvalidRequest(
            f"expires_after.seconds must be in [{MIN_LIFETIME_S}, {MAX_LIFETIME_S}].",
            param="expires_after.seconds",
        )
    return seconds
