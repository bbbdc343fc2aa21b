"""Files of pictures, good and hostile: each is read as it looks, or refused in a sentence."""

from __future__ import annotations

import io
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine.contract.errors import InvalidRequest
from engine.multimodal.processor import MAX_PIXELS, open_image
from tests.engine.multimodal.hostile_pictures import pillow_pictures

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    """The picture as a file."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def colours(width: int = 40, height: int = 30) -> Image.Image:
    """A picture with other colours in each quarter."""
    array = np.zeros((height, width, 3), np.uint8)
    array[: height // 2, : width // 2] = (250, 10, 10)
    array[: height // 2, width // 2 :] = (10, 250, 10)
    array[height // 2 :, : width // 2] = (10, 10, 250)
    array[height // 2 :, width // 2 :] = (240, 240, 20)
    return Image.fromarray(array)


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is that large, and holds next to nothing."""

    def chunk(name: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + crc

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 100)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_is_read_in_rgb(form: str) -> None:
    image = open_image(encoded(colours(), form))
    assert image.mode == "RGB"
    assert image.size == (40, 30)
    assert np.abs(np.asarray(image, int) - np.asarray(colours(), int)).mean() < 12


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "I;16", "F"])
def test_other_colour_modes_become_rgb(mode: str) -> None:
    form = {"CMYK": "JPEG", "YCbCr": "JPEG", "F": "TIFF"}.get(mode, "PNG")
    if mode == "I;16":
        image = Image.fromarray(np.full((4, 4), 40_000, np.uint16))
    else:
        image = colours().convert(mode)
    read = open_image(encoded(image, form))
    assert read.mode == "RGB"
    if mode == "I;16":
        assert np.asarray(read)[0, 0, 0] == pytest.approx(40_000 / 257, abs=1)


def test_what_is_transparent_is_white() -> None:
    assert open_image(encoded(Image.new("RGBA", (3, 3), (255, 0, 0, 0)), "PNG")).getpixel(
        (1, 1)
    ) == (255, 255, 255)


def test_a_photograph_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    image = open_image(encoded(colours(), "JPEG", exif=exif))
    assert image.size == (30, 40)


def test_of_an_animation_the_first_frame_is_seen() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    red, _, blue = open_image(data).getpixel((1, 1))
    assert red > 200 > blue


@pytest.mark.parametrize(
    ("width", "height"), [(100_000, 100_000), (1, 2**31 - 1), (2**31 - 1, 1), (20_000, 20_000)]
)
def test_fault_36_a_bomb_is_refused_before_it_is_decoded(width: int, height: int) -> None:
    with pytest.raises(InvalidRequest):
        open_image(png_header(width, height))
    assert width * height > MAX_PIXELS


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (3, 40_000), (1, 1_000_000)])
def test_fault_36_a_sliver_is_refused_before_it_is_enlarged(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match=f"{size[0]} x {size[1]} pixels; .* at most 200 times"):
        open_image(encoded(Image.new("RGB", size), "PNG"))
    at_limit = (min(size[0], 200), min(size[1], 200))
    assert open_image(encoded(Image.new("RGB", at_limit), "PNG")).size == at_limit


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"GIF89a",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7\n",
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff\xe0",
        b"RIFF\x10\0\0\0WEBPVP8 ",
        b"BM" + b"\xff" * 60,
        b"II*\0\xff\xff\xff\xff",
        png_header(0, 10),
        png_header(50, 50),
    ],
)
def test_what_is_no_picture_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        open_image(data)
    assert refused.value.message.startswith("The image can't be read")


@pytest.mark.parametrize("form", FORMATS)
def test_damaged_files_are_read_or_refused(form: str) -> None:
    """Cut off, with bytes flipped, doubled and swapped, at random places."""
    rng = random.Random(form)
    full = encoded(colours(), form)
    for _ in range(60):
        data = bytearray(full)
        match rng.randrange(4):
            case 0:
                del data[rng.randrange(len(data)) :]
            case 1:
                for _ in range(rng.randrange(1, 9)):
                    data[rng.randrange(len(data))] = rng.randrange(256)
            case 2:
                index = rng.randrange(len(data))
                data[index:index] = data[max(0, index - 50) : index]
            case 3:
                data = bytearray(data[: len(data) // 2] + rng.randbytes(200))
        try:
            image = open_image(bytes(data))
        except InvalidRequest:
            continue
        assert image.mode == "RGB"
        assert image.width * image.height <= MAX_PIXELS


@pytest.mark.slow
def test_fault_36_the_pictures_that_pillow_is_tested_with_are_read_or_refused(
    tmp_path: Path,
) -> None:
    num_read = num_refused = 0
    for name, data in pillow_pictures(tmp_path):
        try:
            assert open_image(data).mode == "RGB", name
            num_read += 1
        except InvalidRequest:
            num_refused += 1
    assert num_read > 600
    assert num_refused > 300
