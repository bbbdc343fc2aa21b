"""`/v1/files`: upload, list, retrieve, content, delete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import msgspec
from django.conf import settings
from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest, HttpResponseRedirect, StreamingHttpResponse
from django.http.multipartparser import MultiPartParserError
from django.http.response import HttpResponseBase
from django.utils.http import content_disposition_header
from drf_spectacular.types import OpenApiTypes

from common.db import run_in_db_thread, run_in_file_thread
from common.errors import NotFound
from engine.contract.errors import InvalidRequest
from inference.errors import PayloadTooLarge, UnsupportedMediaType
from inference.loop.offload import in_report_thread
from inference.schemas import objects
from inference.web.endpoint_schema import PAGE_PARAMETERS, Endpoint, EndpointSchema
from inference.web.responses import (
    JSON_ONLY,
    ApplicationBinaryRenderer,
    BinaryRenderer,
    PageQuery,
    list_response,
    parse_page_query,
    resource_closers,
)
from inference.web.views import LIST_COST, GatewayRequest, GatewayView, json_response
from storage.access import StoredFile, access_file, access_files, blob_url, open_blob, page
from storage.actions import create_file, delete_file
from storage.actions.files import lifetime
from tenants.authentication import Caller

_encode = msgspec.json.Encoder().encode

#: Accepted purposes of files: a batch's requests, or an image in a message. OpenAI's others are
#: rejected by name.
PURPOSES = ("batch", "vision", "user_data", "assistants")
OTHER_PURPOSES = ("evals", "fine-tune")
MIN_LIFETIME_S, MAX_LIFETIME_S = 3600, 30 * 24 * 3600
FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})


@dataclass
class UploadForm:
    """A validated form. `lifetime_s`: seconds until the file expires, or None."""

    file: UploadedFile
    purpose: str
    lifetime_s: int | None


@contextmanager
def upload_form(request: HttpRequest) -> Iterator[UploadForm]:
    """Parse the body; the file's temporary copy is deleted after the block. Blocks on the disk.

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
    size, limit = parts[0].size, settings.QUIRE.max_file_bytes
    if not size:
        raise InvalidRequest("The file is empty.", param="file")
    if size > limit:
        raise PayloadTooLarge(f"The file has {size} bytes; the limit is {limit}.", param="file")
    return UploadForm(parts[0], checked_purpose(fields.get("purpose")), _lifetime(fields))


def checked_purpose(purpose: str | None) -> str:
    """Validate a file's purpose. Raises `InvalidRequest`."""
    if purpose in PURPOSES:
        return str(purpose)
    if purpose in OTHER_PURPOSES:
        raise InvalidRequest(f"The purpose {purpose!r} is not supported.", param="purpose")
    raise InvalidRequest(
        "Missing required parameter: 'purpose'."
        if not purpose
        else f"{purpose[:50]!r} isn't a purpose. Use {' or '.join(map(repr, PURPOSES))}.",
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


CHUNK = 1 << 18
#: Purpose of the files that batches write.
OUTPUT_PURPOSE = "batch_output"


def file_object(row: StoredFile) -> dict[str, Any]:
    """OpenAI's `file` object."""
    return {
        "id": row.public_id,
        "object": "file",
        "bytes": row.size,
        "created_at": int(row.created_at.timestamp()),
        "expires_at": int(row.expires_at.timestamp()) if row.expires_at else None,
        "filename": row.filename,
        "purpose": row.purpose,
        "status": "processed",
        "status_details": None,
    }


_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "format": "binary", "minLength": 1},
        "purpose": {"type": "string", "enum": list(PURPOSES)},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}


class FilesView(GatewayView):
    schema = EndpointSchema(
        "Files",
        get=Endpoint(
            "List files", objects.FilePage, parameters=PAGE_PARAMETERS, operation_id="v1_files_list"
        ),
        post=Endpoint("Upload a file", objects.StoredFileObject, {"multipart/form-data": _FORM}),
    )
    call_cost = LIST_COST

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Store an upload (multipart/form-data: `file`, `purpose`, `expires_after`)."""
        row = await run_in_file_thread(_keep, request)
        return json_response(file_object(row))

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """The tenant's files, a page at a time."""
        page_query = parse_page_query(request, default=10_000, max_limit=10_000)
        purpose = request.GET.get("purpose") or None
        if purpose not in (None, *PURPOSES, OUTPUT_PURPOSE):
            raise InvalidRequest(f"{purpose[:50]!r} isn't a purpose.", param="purpose")
        return json_response(
            await in_report_thread(request.caller, _listed, request.caller, page_query, purpose)
        )


def _keep(request: GatewayRequest) -> StoredFile:
    with upload_form(request) as form:
        return create_file(
            caller=request.caller,
            filename=form.file.name or "",
            purpose=form.purpose,
            size=form.file.size or 0,
            chunks=form.file.chunks(),
            expires_at=lifetime(form.lifetime_s),
        )


def _listed(caller: Caller, page_query: PageQuery, purpose: str | None) -> bytes:
    """The page as JSON, encoded in the thread that reads it: files may be thousands."""
    rows = access_files(caller)
    if purpose:
        rows = rows.filter(purpose=purpose)
    files, more = page(
        rows, limit=page_query.limit, after=page_query.after, newest_first=page_query.newest_first
    )
    return _encode(list_response(files, more, file_object))


class FileView(GatewayView):
    schema = EndpointSchema(
        "Files",
        get=Endpoint("Read a file's facts", objects.StoredFileObject),
        delete=Endpoint("Delete a file", objects.Deleted, responses={409: objects.ErrorAnswer}),
    )

    async def get(self, request: GatewayRequest, file_id: str) -> HttpResponseBase:
        """Return the file's object."""
        row = await run_in_db_thread(access_file, request.caller, file_id)
        return json_response(file_object(row))

    async def delete(self, request: GatewayRequest, file_id: str) -> HttpResponseBase:
        """Delete it and its bytes."""
        await run_in_db_thread(delete_file, caller=request.caller, public_id=file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})


class FileContentView(GatewayView):
    schema = EndpointSchema(
        "Files",
        get=Endpoint(
            "Download a file",
            OpenApiTypes.BINARY,
            media_types={"application/octet-stream": OpenApiTypes.BINARY},
        ),
    )
    renderer_classes = (BinaryRenderer, ApplicationBinaryRenderer, *JSON_ONLY)

    async def get(self, request: GatewayRequest, file_id: str) -> HttpResponseBase:
        """The whole file, always as a download, so that no content runs in a browser."""
        row = await run_in_db_thread(access_file, request.caller, file_id)
        disposition = content_disposition_header(True, row.filename) or "attachment"
        url = await asyncio.to_thread(blob_url, row.tenant_id, row.public_id, disposition)
        if url is not None:  # clients drop the key when they follow it, because the host differs
            return HttpResponseRedirect(url)
        try:
            file = await run_in_file_thread(open_blob, row.tenant_id, row.public_id)
        except FileNotFoundError:
            raise NotFound("The content of the file no longer exists.", param="id") from None
        response = StreamingHttpResponse(_chunks(file), content_type="application/octet-stream")
        response["Content-Length"] = str(row.size)
        response["Content-Disposition"] = disposition
        response["X-Content-Type-Options"] = "nosniff"
        resource_closers(response).append(file.close)
        return response


async def _chunks(file: IO[bytes]) -> AsyncGenerator[bytes, None]:
    while chunk := await asyncio.to_thread(file.read, CHUNK):
        yield chunk
