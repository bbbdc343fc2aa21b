"""Text and images of PDF pages, by PDFium."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from engine.contract.errors import InvalidRequest
from engine.multimodal.inputs import DocumentPage

if TYPE_CHECKING:
    import pypdfium2

#: Pixels per inch of a page's image, and maximum pixels of its longer side. They make an A4 page
#: readable, and encoders don't use more.
DPI, MAX_SIDE = 144, 1568
#: Limits of a document. More text doesn't fit into any model's context.
MAX_PAGES, MAX_TEXT_CHARS = 1000, 1 << 24
#: Limit of all images of a document.
MAX_IMAGE_BYTES = 1 << 27


def read_pdf(data: bytes, max_images: int, param: str = "messages") -> list[DocumentPage]:
    """Return the pages of a PDF.

    Args:
        max_images: maximum number of pages, which are rendered; with 0 they have only text, and
            `MAX_PAGES` is the maximum.
        param: the field that errors report.

    Raises `InvalidRequest` for a file that isn't a PDF, is encrypted or damaged, or has too many
    pages, too much text or too large images.
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
    # PDFium returns U+FFFE for the hyphen of a divided word.
    text = textpage.get_text_bounded().replace("\r\n", "\n").replace("\ufffe", "-").strip()
    textpage.close()
    image = b""
    if draws:
        longer_side = max(*page.get_size(), 1.0)
        buffer = io.BytesIO()
        picture = page.render(scale=min(DPI / 72, MAX_SIDE / longer_side)).to_pil()
        # A scanned page would have several megabytes in a lossless format.
        picture.convert("RGB").save(buffer, "JPEG", quality=95, subsampling=0)
        image = buffer.getvalue()
    page.close()
    return DocumentPage(text.replace("\0", ""), image)
