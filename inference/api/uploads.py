"""`/v1/uploads`: announce a file, send its parts, assemble it."""

from __future__ import annotations

from typing import Annotated, Any

from django.conf import settings
from django.http.multipartparser import MultiPartParserError
from django.http.response import HttpResponseBase
from pydantic import Field, StringConstraints

from common.db import run_in_db_thread, run_in_file_thread
from engine.contract.errors import InvalidRequest
from inference.api.files import checked_purpose, file_object
from inference.errors import PayloadTooLarge, UnsupportedMediaType
from inference.schemas import objects
from inference.schemas.base import OutputExpiresAfter, StrictModel
from inference.web.endpoint_schema import Endpoint, EndpointSchema
from inference.web.views import GatewayRequest, GatewayView, json_response
from storage.access import StoredUpload, UploadPart
from storage.actions import add_part, cancel_upload, complete_upload, create_upload
from storage.actions.files import MAX_PARTS

#: Maximum size of a part, as at OpenAI.
MAX_PART_BYTES = 64 << 20
Name = Annotated[str, StringConstraints(min_length=1, max_length=255)]


class UploadRequest(StrictModel):
    """An announced file."""

    bytes: Annotated[int, Field(ge=1)]
    filename: Name
    mime_type: Annotated[str, StringConstraints(max_length=255, pattern=r"^[!-~ ]+$")]
    purpose: Name
    expires_after: OutputExpiresAfter | None = None


class CompleteRequest(StrictModel):
    """The parts in order."""

    part_ids: Annotated[
        list[Annotated[str, StringConstraints(max_length=100)]],
        Field(min_length=1, max_length=MAX_PARTS),
    ]
    md5: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{32}$")] | None = None


def upload_object(row: StoredUpload) -> dict[str, Any]:
    """OpenAI's `upload`."""
    return {
        "id": row.public_id,
        "object": "upload",
        "bytes": row.size,
        "created_at": int(row.created_at.timestamp()),
        "expires_at": int(row.expires_at.timestamp()) if row.expires_at else None,
        "filename": row.filename,
        "purpose": row.purpose,
        "status": row.status,
        "file": file_object(row.file) if row.file else None,
    }


class UploadsView(GatewayView):
    schema = EndpointSchema(
        "Files",
        post=Endpoint("Announce a file that comes in parts", objects.UploadObject, UploadRequest),
    )

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """A new upload, valid for an hour."""
        parsed = UploadRequest.model_validate(self.read_json(request))
        limit = settings.QUIRE.max_file_bytes
        if parsed.bytes > limit:
            raise PayloadTooLarge(
                f"The file has {parsed.bytes} bytes; the limit is {limit}.", param="bytes"
            )
        row = await run_in_db_thread(
            create_upload,
            caller=request.caller,
            filename=parsed.filename,
            purpose=checked_purpose(parsed.purpose),
            mime_type=parsed.mime_type,
            size=parsed.bytes,
            lifetime_s=parsed.expires_after.seconds if parsed.expires_after else None,
        )
        return json_response(upload_object(row))


_PART: dict[str, Any] = {
    "type": "object",
    "required": ["data"],
    "additionalProperties": False,
    "properties": {"data": {"type": "string", "format": "binary", "minLength": 1}},
}


class UploadPartsView(GatewayView):
    schema = EndpointSchema(
        "Files",
        post=Endpoint(
            "Send a part of an upload",
            objects.UploadPartObject,
            {"multipart/form-data": _PART},
        ),
    )

    async def post(self, request: GatewayRequest, upload_id: str) -> HttpResponseBase:
        """Store a part (multipart/form-data: `data`)."""
        part = await run_in_file_thread(_keep, request, upload_id)
        body = {
            "id": part.public_id,
            "object": "upload.part",
            "created_at": int(part.created_at.timestamp()),
            "upload_id": upload_id,
        }
        return json_response(body)


def _keep(request: GatewayRequest, upload_id: str) -> UploadPart:
    if request.content_type != "multipart/form-data":
        raise UnsupportedMediaType("A part is sent as multipart/form-data.")
    try:
        fields, files = request.POST, request.FILES
    except MultiPartParserError as error:
        raise InvalidRequest(f"The form can't be read: {error}", code="invalid_form") from None
    try:
        parts = files.getlist("data")
        if len(parts) != 1 or set(fields) or set(files) != {"data"}:
            raise InvalidRequest("The form must hold one file in the field 'data'.", param="data")
        size = parts[0].size or 0
        if not size:
            raise InvalidRequest("The part is empty.", param="data")
        if size > MAX_PART_BYTES:
            raise PayloadTooLarge(
                f"The part has {size} bytes; the limit is {MAX_PART_BYTES}.", param="data"
            )
        return add_part(
            caller=request.caller, public_id=upload_id, size=size, chunks=parts[0].chunks()
        )
    finally:
        for _, parts in files.lists():
            for part in parts:
                part.close()


class UploadCompleteView(GatewayView):
    schema = EndpointSchema(
        "Files",
        post=Endpoint("Make the file from its parts", objects.UploadObject, CompleteRequest),
    )

    async def post(self, request: GatewayRequest, upload_id: str) -> HttpResponseBase:
        """Assemble the file."""
        parsed = CompleteRequest.model_validate(self.read_json(request))
        row = await run_in_file_thread(
            complete_upload,
            caller=request.caller,
            public_id=upload_id,
            part_ids=parsed.part_ids,
            md5=parsed.md5,
        )
        return json_response(upload_object(row))


class UploadCancelView(GatewayView):
    schema = EndpointSchema("Files", post=Endpoint("Cancel an upload", objects.UploadObject))

    async def post(self, request: GatewayRequest, upload_id: str) -> HttpResponseBase:
        """Delete its parts."""
        row = await run_in_db_thread(cancel_upload, caller=request.caller, public_id=upload_id)
        return json_response(upload_object(row))
