"""Finds the media that a chat's parts name, and admits them within limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.db import run_in_db_thread
from common.errors import NotFound
from engine.contract.errors import InvalidRequest
from engine.contract.messages import ModelInfo
from inference.rendering.prompt_embeds import read_embeds, read_grid, to_float32
from inference.schemas.chat import AUDIO_PARTS, FILE_PART, IMAGE_PARTS, VIDEO_PART, part_type
from metering.media import admit_media
from storage.access import access_file
from tenants.authentication import Caller

#: The field and the kind of image parts.
_IMAGE = ("image_url", "image")


@dataclass(frozen=True, slots=True)
class MediaSource:
    """An image, video, sound or document in a message.

    Attributes:
        kind: "image", "video", "audio" or "document".
        url: `data:`, https, or `file:` if the operator allows it; "" for a stored file.
        param: its name in errors.
        file_id: id of a file that the tenant has uploaded.
        tenant_id: that file's owner.
        filename: of a document, or "".
        data: the file of a document's page; or embeddings, float32.
        file_bytes: size of a stored file.
        embeds_size: size of each vector of embeddings.
        grid: of embeddings, see `MediaProcessor.prepare_embeds`.
    """

    url: str
    param: str
    file_id: str = ""
    tenant_id: int = 0
    kind: str = "image"
    filename: str = ""
    data: bytes = b""
    file_bytes: int | None = None
    embeds_size: int = 0
    grid: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int | None:
        """Size of the file, if it is known before fetching."""
        if self.embeds_size:
            return len(self.data)
        return len(self.url) * 3 // 4 if self.url.startswith("data:") else self.file_bytes


def iterate_parts(messages: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parts of validated messages, with the names that errors use for them."""
    for number, message in enumerate(messages):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict):
                yield f"messages[{number}].content[{index}]", part


def find_media(messages: Sequence[dict[str, Any]], info: ModelInfo) -> list[MediaSource]:
    """The media of validated messages, in order.

    Raises `InvalidRequest` as `check_num_media` does.
    """
    sources = []
    for param, part in iterate_parts(messages):
        kind = part_type(part)
        if kind in IMAGE_PARTS and part.get("image_embeds") is not None:
            sources.append(_embeds_source(part["image_embeds"], "image", param, info))
        elif kind in (*IMAGE_PARTS, VIDEO_PART):
            name, medium = ("video_url", "video") if kind == VIDEO_PART else _IMAGE
            address = part.get(name) or ""
            url = address["url"] if isinstance(address, dict) else address
            sources.append(MediaSource(url, param, part.get("file_id") or "", kind=medium))
        elif kind in AUDIO_PARTS:
            sources.append(_audio_source(part, param, info))
        elif kind == FILE_PART:
            sources.append(_document_source(part["file"], param))
    check_num_media(sources, info)
    return sources


def _audio_source(part: Mapping[str, Any], param: str, info: ModelInfo) -> MediaSource:
    if (embeds := part.get("audio_embeds")) is not None:
        return _embeds_source(embeds, "audio", param, info)
    address = part.get("audio_url") or ""
    url = address["url"] if isinstance(address, dict) else address
    if (inline := part.get("input_audio")) is not None:
        url = f"data:;base64,{inline['data']}"
    return MediaSource(url, param, part.get("file_id") or "", kind="audio")


def _embeds_source(
    embeds: str | Mapping[str, str | None], kind: str, param: str, info: ModelInfo
) -> MediaSource:
    """A medium that comes as its encoder's vectors, and perhaps their grid."""
    field = f"{kind}_embeds"
    if not (info.sees if kind == "image" else info.max_audios):
        raise InvalidRequest(f"The model {info.name} takes no {field}.", param=param)
    if not info.prompt_embeds_size:
        raise InvalidRequest(
            f"{field} aren't accepted: the model's replicas need --enable-prompt-embeds.",
            param=param,
        )
    parts = {field: embeds} if isinstance(embeds, str) else embeds
    vectors = read_embeds(parts[field] or "", info.prompt_embeds_size, field, param)
    grid_name = "image_grid_thw"
    grid = read_grid(text, grid_name, param) if (text := parts.get(grid_name)) else ()
    data = to_float32(vectors)
    return MediaSource("", param, kind=kind, data=data, embeds_size=vectors.size, grid=grid)


def _document_source(file: Mapping[str, str | None], param: str) -> MediaSource:
    url, file_id = file.get("file_url") or "", file.get("file_id") or ""
    if data := file.get("file_data"):
        url = data if data.startswith("data:") else f"data:;base64,{data}"
    return MediaSource(url, param, file_id, kind="document", filename=file.get("filename") or "")


def check_num_media(sources: Sequence[MediaSource], info: ModelInfo) -> None:
    """Raise `InvalidRequest` for media that the model doesn't accept, or for too many."""
    limits = (
        ("image", "images (parts of type image_url)", info.max_images if info.sees else 0),
        ("video", "videos (parts of type video_url)", info.max_videos),
        ("audio", "audio (parts of type audio_url and input_audio)", info.max_audios),
    )
    for medium, noun, limit in limits:
        of_kind = [source for source in sources if source.kind == medium]
        if of_kind and not limit:
            raise InvalidRequest(
                f"The model {info.name} takes no {noun}.",
                param=of_kind[0].param,
            )
        if len(of_kind) > limit:
            raise InvalidRequest(
                f"A request may have at most {limit} {medium}s, this one has {len(of_kind)}.",
                param="messages",
            )


async def admit_sources(sources: Sequence[MediaSource], caller: Caller) -> list[MediaSource]:
    """Count all of a request's media against the limits, before any is fetched.

    Returns the sources with owners, names and sizes of stored files.

    Raises:
        InvalidRequest: a stored file doesn't exist, or belongs to another tenant.
        RateLimited: over a limit, temporarily or permanently; see `admit_media`.
    """
    sources = await locate_files(sources, caller)
    num_bytes = sum(source.num_bytes or 0 for source in sources)
    param = sources[0].param
    await admit_media(caller, count=len(sources), num_bytes=num_bytes, param=param)
    return list(sources)


async def locate_files(sources: Sequence[MediaSource], caller: Caller) -> Sequence[MediaSource]:
    """Add owners, names and sizes of stored files to the sources. Raises `InvalidRequest` for
    another tenant's file.
    """
    if any(source.file_id for source in sources):
        return await run_in_db_thread(_locate_files, caller, sources)
    return sources


def _locate_files(caller: Caller, sources: Sequence[MediaSource]) -> list[MediaSource]:
    located = []
    for source in sources:
        if source.file_id:
            try:
                row = access_file(caller, source.file_id)
            except NotFound as error:
                raise InvalidRequest(error.message, param=source.param) from None
            name = source.filename or row.filename
            source = replace(source, tenant_id=row.tenant_id, filename=name, file_bytes=row.size)
        located.append(source)
    return located
