"""Documents of a chat: their pages replace the parts that name them, as images and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.contract.errors import InvalidRequest
from engine.contract.messages import ModelInfo
from engine.multimodal.documents import MAX_TEXT_CHARS
from engine.multimodal.inputs import DocumentPage
from inference.rendering.media_pool import get_media_pool
from inference.rendering.media_sources import MediaSource, check_num_media
from tenants.authentication import Caller

#: The field of a document page's part that holds the page's image file.
PAGE_IMAGE = "page_image"


async def read_documents(
    sources: Sequence[MediaSource], info: ModelInfo, caller: Caller
) -> dict[str, list[dict[str, Any]]]:
    """Read the documents among admitted sources; return parts by the names that they replace.

    A page of a PDF becomes an image and its text, or only text for a model without image input.

    Raises:
        InvalidRequest: a document can't be fetched or read; names the part.
        Overloaded: too many of the tenant's documents wait.
    """
    pool, max_images = get_media_pool(), info.max_images if info.sees else 0
    parts = {}
    num_images = num_chars = 0
    # One at a time: processed together, a request's documents would take gigabytes before their
    # pages are counted.
    for source in sources:
        if source.kind != "document":
            continue
        document = await pool.read_document(source, max_images, caller)
        num_images += sum(bool(page.image) for page in document.pages)
        num_chars += sum(len(page.text) for page in document.pages)
        if num_images > max_images or num_chars > MAX_TEXT_CHARS:
            raise InvalidRequest(
                f"The documents of a request may have at most {max_images} images and "
                f"{MAX_TEXT_CHARS} characters; those up to this one have {num_images} and "
                f"{num_chars}.",
                param=source.param,
            )
        if not max_images and not any(page.text for page in document.pages):
            raise InvalidRequest(
                f"The document has no text, and the model {info.name} takes no images.",
                param=source.param,
            )
        parts[source.param] = _document_parts(document.pages, source.filename)
    return parts


def _document_parts(pages: Sequence[DocumentPage], filename: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for number, page in enumerate(pages, 1):
        lines = [filename] if filename and number == 1 else []
        if len(pages) > 1:
            lines.append(f"Page {number} of {len(pages)}:")
        if page.image:
            if lines:
                parts.append({"type": "text", "text": "\n".join(lines) + "\n"})
            parts.append({"type": "image_url", PAGE_IMAGE: page.image})
            lines = []
        lines.append(page.text or ("" if page.image else "(This page has no text.)"))
        parts.append({"type": "text", "text": "\n".join(lines) + "\n"})
    return parts


def insert_documents(
    messages: Sequence[dict[str, Any]], documents: Mapping[str, Sequence[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Replace the documents in the messages by the parts of `read_documents`."""
    inserted = []
    for number, message in enumerate(messages):
        if isinstance(content := message.get("content"), list):
            parts: list[Any] = []
            for index, part in enumerate(content):
                parts += documents.get(f"messages[{number}].content[{index}]", [part])
            message = {**message, "content": parts}
        inserted.append(message)
    return inserted


def insert_pages(
    sources: Sequence[MediaSource],
    documents: Mapping[str, Sequence[dict[str, Any]]],
    info: ModelInfo,
) -> list[MediaSource]:
    """Replace the documents among the sources by the images of their pages.

    Raises `InvalidRequest` for more images than the model takes.
    """
    inserted = []
    for source in sources:
        if source.kind != "document":
            inserted.append(source)
            continue
        pages = [part[PAGE_IMAGE] for part in documents[source.param] if PAGE_IMAGE in part]
        inserted += [MediaSource("", source.param, data=page) for page in pages]
    check_num_media(inserted, info)
    return inserted
