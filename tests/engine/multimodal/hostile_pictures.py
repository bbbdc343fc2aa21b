"""Pictures as nobody should send them: every one is read as it looks, or refused by its part."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import PIL
import pytest
from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def hostile_pictures(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """The names of so many files' kinds, in turns, and the files; the same for the same seed."""
    return in_turns(KINDS, count, seed)


def in_turns(
    kinds: Sequence[Callable[[Random], bytes]], count: int, seed: int
) -> Iterator[tuple[str, bytes]]:
    """So many files of these kinds, in turns, with the kinds' names."""
    rng = Random(seed)
    for index in range(count):
        kind = kinds[index % len(kinds)]
        yield kind.__name__.strip("_"), kind(rng)


def truncated(rng: Random, data: bytes) -> bytes:
    """Any beginning of a file."""
    return data[: rng.randrange(len(data))]


def with_flipped_bytes(rng: Random, data: bytes, max_count: int) -> bytes:
    """A file with up to `max_count` other bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, max_count)):
        changed[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(changed)


def with_repeated_part(rng: Random, data: bytes, max_length: int) -> bytes:
    """A file in which a part of up to `max_length` bytes comes twice."""
    start = rng.randrange(len(data))
    return data[:start] + data[max(0, start - max_length) :]


def pillow_pictures(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Pictures that Pillow is tested with, among them what has crashed it: they lie in its source,
    which is downloaded into the folder. Skips the test where there is no package index.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "pillow"]
    subprocess.run([*command, f"pillow=={PIL.__version__}"], cwd=folder, check=False)
    paths = [*folder.glob("*.tar.gz")]
    if not paths:
        pytest.skip("no package index gives Pillow's source")
    with tarfile.open(paths[0]) as source:
        for member in source:
            if "/Tests/images/" in member.name and member.isfile():
                file = source.extractfile(member)
                assert file is not None
                yield member.name, file.read()


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    """The picture as a file."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def png(
    width: int,
    height: int,
    *,
    depth: int = 8,
    color: int = 2,
    data: bytes = b"",
    extra: bytes = b"",
    interlace: int = 0,
) -> bytes:
    """A PNG with this header, which need not be true of its `data`."""
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlace)
    body = png_chunk(b"IHDR", head) + extra + png_chunk(b"IDAT", zlib.compress(data))
    return PNG_SIGNATURE + body + png_chunk(b"IEND", b"")


def png_chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG with its checksum."""
    checksum = struct.pack(">I", zlib.crc32(name + data))
    return struct.pack(">I", len(data)) + name + data + checksum


def _picture(rng: Random, mode: str = "RGB") -> Image.Image:
    width, height = rng.randint(1, 60), rng.randint(1, 60)
    pixels = np.frombuffer(rng.randbytes(width * height * 3), np.uint8)
    return Image.fromarray(pixels.reshape(height, width, 3)).convert(mode)


def _file(rng: Random) -> bytes:
    return encoded(_picture(rng), rng.choice(FORMATS))


def _truncated(rng: Random) -> bytes:
    return truncated(rng, _file(rng))


def _flipped_bytes(rng: Random) -> bytes:
    return with_flipped_bytes(rng, _file(rng), 12)


def _repeated_part(rng: Random) -> bytes:
    return with_repeated_part(rng, _file(rng), 60)


def _invalid_checksum(rng: Random) -> bytes:
    data = encoded(_picture(rng), "PNG")
    position = data.index(b"IDAT") + 4 + struct.unpack(">I", data[33:37])[0]
    return data[:position] + rng.randbytes(4) + data[position + 4 :]


def _bomb(rng: Random) -> bytes:
    width, height = rng.choice([(60_000, 60_000), (1, 2**31 - 1), (2**31 - 1, 1), (9_000, 9_941)])
    return png(width, height, data=bytes(100_000))


def _compressed_bomb(rng: Random) -> bytes:
    side = rng.choice([1_000, 4_000])
    return png(side, side, color=0, data=bytes(side * (side + 1)))


def _no_pixels(rng: Random) -> bytes:
    return png(*rng.choice([(0, 10), (10, 0), (0, 0)]))


def _sliver(rng: Random) -> bytes:
    width, height = rng.choice([(1, 65_535), (65_535, 1), (1, 1_000_000), (3, 40_000)])
    rows = b"\0" + bytes(width * 3)
    return png(width, height, data=rows * height)


def _one_pixel(rng: Random) -> bytes:
    return encoded(Image.new(rng.choice(["RGB", "L", "1", "RGBA"]), (1, 1)), "PNG")


def _more_rows_than_data(rng: Random) -> bytes:
    return png(rng.randint(100, 4_000), rng.randint(100, 4_000), data=bytes(rng.randint(0, 900)))


def _forged_depth(rng: Random) -> bytes:
    depth, color = rng.choice([1, 3, 16, 32, 255]), rng.choice([0, 1, 2, 3, 4, 5, 6, 7])
    return png(8, 8, depth=depth, color=color, data=rng.randbytes(400))


def _interlaced(rng: Random) -> bytes:
    return png(rng.randint(1, 40), rng.randint(1, 40), interlace=1, data=rng.randbytes(3_000))


def _forged_bmp(rng: Random) -> bytes:
    data = bytearray(encoded(_picture(rng), "BMP"))
    struct.pack_into("<ii", data, 18, rng.choice([-5, 30_000]), rng.choice([-(2**31), 2**31 - 1]))
    return bytes(data)


def _forged_gif(rng: Random) -> bytes:
    data = bytearray(encoded(_picture(rng), "GIF"))
    struct.pack_into("<HH", data, 6, rng.choice([0, 65_535]), rng.choice([0, 65_535]))
    return bytes(data)


def _forged_tiff(rng: Random) -> bytes:
    entries = [(256, 2**31), (257, rng.choice([1, 2**20])), (258, 8), (273, 8), (279, 2**31 - 1)]
    body = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + body + struct.pack("<I", 8)


def _forged_webp(rng: Random) -> bytes:
    data = bytearray(encoded(_picture(rng), "WEBP"))
    struct.pack_into("<I", data, 4, rng.choice([0, 2**32 - 1]))
    return bytes(data)


def _huge_exif(rng: Random) -> bytes:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = rng.randint(0, 255), "x" * rng.randint(1, 65_000)
    return encoded(_picture(rng), "JPEG", exif=exif)


def _forged_exif(rng: Random) -> bytes:
    exif = b"Exif\0\0" + rng.choice([b"II*\0", b"MM\0*", b""]) + rng.randbytes(300)
    return encoded(_picture(rng), rng.choice(["JPEG", "PNG", "WEBP"]), exif=exif)


def _long_comments(rng: Random) -> bytes:
    text = png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(rng.choice([10**5, 2 * 10**7]))))
    return png(4, 4, data=bytes(4 * 13), extra=text * rng.randint(1, 4))


def _sixteen_bits(rng: Random) -> bytes:
    values = np.frombuffer(rng.randbytes(800), np.uint16).reshape(20, 20)
    return encoded(Image.fromarray(values), rng.choice(["PNG", "TIFF"]))


def _floats(rng: Random) -> bytes:
    values = np.array([[np.nan, np.inf], [-1e30, rng.random()]], np.float32)
    return encoded(Image.fromarray(values), "TIFF")


def _cmyk(rng: Random) -> bytes:
    return encoded(_picture(rng, "CMYK"), rng.choice(["JPEG", "TIFF"]))


def _palette_with_alpha(rng: Random) -> bytes:
    image = _picture(rng, "P")
    alpha = rng.choice([rng.randrange(256), rng.randbytes(rng.randint(1, 256))])
    return encoded(image, "PNG", transparency=alpha)


def _index_beyond_the_palette(rng: Random) -> bytes:
    palette = png_chunk(b"PLTE", rng.randbytes(3 * rng.randint(1, 4)))
    return png(8, 8, color=3, data=bytes([0, *[250] * 8]) * 8, extra=palette)


def _animation(rng: Random) -> bytes:
    frames = [Image.new("RGB", (9, 9), (i, 2 * i, 0)) for i in range(rng.randint(2, 60))]
    form = rng.choice(["GIF", "WEBP", "PNG", "TIFF"])
    return encoded(frames[0], form, save_all=True, append_images=frames[1:])


def _two_formats(rng: Random) -> bytes:
    return _file(rng) + rng.choice([b"PK\x03\x04", b"%PDF-1.7\n", b"<script>"]) + _file(rng)


def _no_picture(rng: Random) -> bytes:
    heads = [b"", b"\0", b"%PDF-1.7\n", b"<svg/>", b"MZ", b"PK\x03\x04", b"\xff\xd8\xff\xe0", b"BM"]
    return rng.choice(heads) + rng.randbytes(rng.choice([0, 10, 5_000]))


def _refused_format(rng: Random) -> bytes:
    return encoded(_picture(rng), rng.choice(["PPM", "ICO", "TGA", "EPS", "PCX", "JPEG2000"]))


KINDS: tuple[Callable[[Random], bytes], ...] = (
    _truncated, _flipped_bytes, _repeated_part, _invalid_checksum, _bomb, _compressed_bomb,
    _no_pixels, _sliver, _one_pixel, _more_rows_than_data, _forged_depth, _interlaced, _forged_bmp,
    _forged_gif, _forged_tiff, _forged_webp, _huge_exif, _forged_exif, _long_comments,
    _sixteen_bits, _floats, _cmyk, _palette_with_alpha, _index_beyond_the_palette, _animation,
    _two_formats, _no_picture, _refused_format,
)  # fmt: skip
