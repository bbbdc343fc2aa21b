"""`/v1/files`: upload, list, retrieve, content, delete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import IO, Any

import msgspec
from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils.http import content_disposition_header

from engine.contract.errors import InvalidRequest
from inference.files.form import PURPOSES, upload_form
from inference.web.negotiation import JSON_ONLY, EventStreamRenderer
from inference.web.paging import Paging, as_list, paging
from inference.web.report_threads import in_report_thread
from inference.web.views import LIST_COST, GatewayRequest, GatewayView, json_response
from storage.access import StoredFile, access_file, access_files, blob_path, page
from storage.actions import create_file, delete_file
from storage.actions.files import lifetime
from storage.errors import NotFound
from tenants.authentication import Caller
from tenants.db_threads import in_db_thread, in_file_thread

_encode = msgspec.json.Encoder().encode
CHUNK = 1 << 18
#: Of the files that batches write.
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


class FilesView(GatewayView):
    """Upload a file, list files."""

    call_cost = LIST_COST

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """Keep an upload (multipart/form-data: `file`, `purpose`, `expires_after`)."""
        row = await in_file_thread(_keep, request)
        return json_response(_encode(file_object(row)))

    async def get(self, request: GatewayRequest) -> HttpResponseBase:
        """The tenant's files, a page at a time."""
        asked = paging(request, default=10_000, most=10_000)
        purpose = request.GET.get("purpose") or None
        if purpose not in (None, *PURPOSES, OUTPUT_PURPOSE):
            raise InvalidRequest(f"{purpose[:50]!r} isn't a purpose.", param="purpose")
        return json_response(
            await in_report_thread(request.caller, _listed, request.caller, asked, purpose)
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


def _listed(caller: Caller, asked: Paging, purpose: str | None) -> bytes:
    """The page as JSON, made where it's read: thousands of files would hold up the event loop."""
    rows = access_files(caller)
    if purpose:
        rows = rows.filter(purpose=purpose)
    found, more = page(rows, limit=asked.limit, after=asked.after, newest_first=asked.newest_first)
    return _encode(as_list(found, more, file_object))


class FileView(GatewayView):
    """One file."""

    async def get(self, request: GatewayRequest, file_id: str) -> HttpResponseBase:
        """What it is."""
        row = await in_db_thread(access_file, request.caller, file_id)
        return json_response(_encode(file_object(row)))

    async def delete(self, request: GatewayRequest, file_id: str) -> HttpResponseBase:
        """Forget it and its bytes."""
        await in_db_thread(delete_file, caller=request.caller, public_id=file_id)
        return json_response(_encode({"id": file_id, "object": "file", "deleted": True}))


class BinaryRenderer(EventStreamRenderer):
    """Bytes as they are; clients ask for them under several names."""

    media_type = "application/octet-stream"
    format = "bin"


class ApplicationBinaryRenderer(BinaryRenderer):
    """What OpenAI's SDKs ask for."""

    media_type = "application/binary"


class FileContentView(GatewayView):
    """A file's bytes."""

    renderer_classes = (BinaryRenderer, ApplicationBinaryRenderer, *JSON_ONLY)

    async def get(self, request: GatewayRequest, file_id: str) -> HttpResponseBase:
        """The whole file, always as a download: nothing in it can run in a browser."""
        row = await in_db_thread(access_file, request.caller, file_id)
        path = blob_path(row.tenant_id, row.public_id)
        try:
            file = await asyncio.to_thread(Path.open, path, "rb")
        except FileNotFoundError:
            raise NotFound("The content of the file no longer exists.", param="id") from None
        response = StreamingHttpResponse(_chunks(file), content_type="application/octet-stream")
        response["Content-Length"] = str(row.size)
        response["Content-Disposition"] = content_disposition_header(True, row.filename)
        response["X-Content-Type-Options"] = "nosniff"
        response._resource_closers.append(file.close)
        return response


async def _chunks(file: IO[bytes]) -> AsyncGenerator[bytes, None]:
    while chunk := await asyncio.to_thread(file.read, CHUNK):
        yield chunk
