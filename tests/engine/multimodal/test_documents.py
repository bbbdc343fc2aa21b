"""PDFs: the text and the picture of each page, and files that lie."""

from __future__ import annotations

import io
import random

import msgspec
import pytest
from PIL import Image

from engine.contract.errors import InvalidRequest
from engine.multimodal.documents import MAX_PAGES, MAX_SIDE, read_pdf
from engine.multimodal.inputs import ANSWERS, PreparedDocument, PrepareDocumentRequest, Refusal
from engine.multimodal.processor import open_image
from engine.system.worker_process import WorkerProcess
from tests.engine.multimodal.pdfs import encrypted_pdf, pdf


def test_a_page_is_its_text_and_a_picture_of_it() -> None:
    first, second = read_pdf(pdf(["Hello world", "Second page"]), max_images=2)
    assert (first.text, second.text) == ("Hello world", "Second page")
    picture = open_image(first.image)
    assert picture.size == (400, 200)  # 144 pixels an inch
    assert (
        min(picture.convert("L").getextrema()) < 64 < 200 < max(picture.convert("L").getextrema())
    )
    assert first.image != second.image
    assert read_pdf(pdf(["Hello world", "Second page"]), max_images=2) == [first, second]


def test_a_page_without_text_is_a_picture_alone() -> None:
    file = io.BytesIO()
    Image.new("RGB", (60, 30), "red").save(file, "PDF")
    (page,) = read_pdf(file.getvalue(), max_images=1)
    assert page.text == ""
    red, green, blue = open_image(page.image).resize((1, 1)).getpixel((0, 0))
    assert red > 200 > 60 > max(green, blue)


def test_text_alone_is_read_where_nothing_may_be_drawn() -> None:
    pages = read_pdf(pdf(["a"] * 20), max_images=0)
    assert [(page.text, page.image) for page in pages] == [("a", b"")] * 20


def test_large_pages_are_drawn_small() -> None:
    (page,) = read_pdf(pdf(["wide"], size="14400 100"), max_images=1)
    assert open_image(page.image).size == (MAX_SIDE, 11)


@pytest.mark.parametrize(
    ("data", "max_images", "message"),
    [
        (encrypted_pdf(), 1, "it is encrypted"),
        (b"%PDF-1.4\nnothing", 1, "no PDF or damaged"),
        (b"", 1, "no PDF or damaged"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), 1, "no PDF or damaged"),
        (pdf([]), 1, "no PDF or damaged"),
        (pdf(["a"] * 3), 2, "at most 2 pages; it has 3"),
        (pdf(["a"] * (MAX_PAGES + 1)), 0, f"it has {MAX_PAGES + 1}"),
    ],
    ids=["encrypted", "truncated", "empty", "picture", "no pages", "many pages", "more pages"],
)
def test_documents_that_cannot_be_read_are_refused(
    data: bytes, max_images: int, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        read_pdf(data, max_images, param="messages[0].content[1]")
    assert refused.value.param == "messages[0].content[1]"


def _damaged(rng: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 12)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    if rng.random() < 0.3:
        del damaged[rng.randrange(len(damaged)) :]
    return bytes(damaged)


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_damaged_documents_are_read_or_refused_by_the_media_worker(count: int) -> None:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 40).save(file, "PDF")
    originals = [pdf(["Hello", "world"]), file.getvalue(), encrypted_pdf()]
    rng, outcomes = random.Random(count), set()
    worker = WorkerProcess("engine.multimodal.worker", "media worker")
    try:
        for number in range(count):
            request = PrepareDocumentRequest(_damaged(rng, originals[number % 3]), 4)
            answer = worker.request(msgspec.msgpack.encode(request), 60)
            if answer is None:  # PDFium gave up: the next document gets a new process
                worker = WorkerProcess("engine.multimodal.worker", "media worker")
                continue
            outcomes.add(type(ANSWERS.decode(answer)))
        request = PrepareDocumentRequest(originals[0], 4)
        answer = ANSWERS.decode(worker.request(msgspec.msgpack.encode(request), 60) or b"")
    finally:
        worker.close()
    assert outcomes == {PreparedDocument, Refusal}
    assert isinstance(answer, PreparedDocument)
    assert [page.text for page in answer.pages] == ["Hello", "world"]
