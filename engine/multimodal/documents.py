"""From a PDF to the text and the picture of each page, by PDFium."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from engine.contract.errors import InvalidRequest
from engine.multimodal.inputs import DocumentPage

if TYPE_CHECKING:
    import pypdfium2

#: Pixels an inch of a page's picture, and pixels of its longer side at most: a page of A4 is
#: readable, and encoders look at no more.
DPI, MAX_SIDE = 144, 1568
#: Of one document. Text beyond fits no model's context.
MAX_PAGES, MAX_TEXT_CHARS = 1000, 1 << 24
#: Of all pictures of one document.
MAX_IMAGE_BYTES = 1 << 27


def read_pdf(data: bytes, max_images: int, param: str = "messages") -> list[DocumentPage]:
    """The pages of a PDF.

    Args:
        max_images: number of pages that may be drawn; with 0 they have text alone.
        param: names the document in errors.

    Raises `InvalidRequest` for what is no PDF, is encrypted or damaged, or has too many pages.
    """
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        hint = "it is encrypted" if "password" in str(error).lower() else "it is no PDF or damaged"
        raise InvalidRequest(f"The document can't be read: {hint}.", param=param) from error
    with document:
        document.init_forms()
        count, limit = len(document), max_images or MAX_PAGES
        if count > limit:
            raise InvalidRequest(
                f"The document must have at most {limit} pages; it has {count}.", param=param
            )
        pages = []
        num_chars = num_bytes = 0
        for index in range(count):
            try:
                page = _read_page(document, index, draws=max_images > 0)
            except pypdfium2.PdfiumError as error:
                raise InvalidRequest(
                    f"Page {index + 1} of the document can't be read: {error}.", param=param
                ) from error
            num_chars += len(page.text)
            num_bytes += len(page.image)
            if num_chars > MAX_TEXT_CHARS or num_bytes > MAX_IMAGE_BYTES:
                raise InvalidRequest("The document's pages hold too much.", param=param)
            pages.append(page)
    return pages


def _read_page(document: pypdfium2.PdfDocument, index: int, *, draws: bool) -> DocumentPage:
    page = document[index]
    textpage = page.get_textpage()
    # PDFium marks the hyphen of a divided word so.
    text = textpage.get_text_bounded().replace("\r\n", "\n").replace("\ufffe", "-").strip()
    textpage.close()
    image = b""
    if draws:
        longer_side = max(*page.get_size(), 1.0)
        buffer = io.BytesIO()
        picture = page.render(scale=min(DPI / 72, MAX_SIDE / longer_side)).to_pil()
        # Lossless, a scanned page has several megabytes.
        picture.convert("RGB").save(buffer, "JPEG", quality=95, subsampling=0)
        image = buffer.getvalue()
    page.close()
    return DocumentPage(text.replace("\0", ""), image)
