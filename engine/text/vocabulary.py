"""Vocabulary pieces as bytes.

Nearly every decoder of today's models maps each token to bytes by itself and then reads the bytes
as UTF-8. For those (`byte_decoder` recognises them) decoding is joining bytes: O(1) a token, and a
stream gives exactly what decoding the whole gives.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
UNDERLINE = "▁"


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


_ALPHABET = _byte_level_alphabet()
_CHARACTERS = {byte: char for char, byte in _ALPHABET.items()}


def byte_level_token(data: bytes) -> str:
    """Bytes in GPT-2's byte alphabet."""
    return "".join(_CHARACTERS[byte] for byte in data)


@dataclass(frozen=True, slots=True)
class ByteDecoder:
    """How a decoder makes bytes of a piece.

    Attributes:
        byte_level: pieces are written in GPT-2's byte alphabet.
        space: the character that stands for a space, or "".
        byte_fallback: `<0xE2>` is a byte.
        strip_first: "" or what the text's very first piece loses: "one" space or "all" of them.
    """

    byte_level: bool = False
    space: str = ""
    byte_fallback: bool = False
    strip_first: str = ""

    def to_bytes(self, piece: str) -> bytes:
        """The bytes of a piece, anywhere but at the start of the text."""
        if self.byte_level:
            try:
                return bytes([_ALPHABET[char] for char in piece])
            except KeyError:
                return piece.encode()
        if self.byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return piece.replace(self.space, " ").encode() if self.space else piece.encode()

    def first_bytes(self, piece: str) -> bytes:
        """The bytes of the text's very first piece."""
        if self.strip_first == "all":
            return piece.replace(self.space, "").encode()
        data = self.to_bytes(piece)
        return data.removeprefix(b" ") if self.strip_first == "one" else data


def byte_decoder(decoder: dict[str, Any] | None) -> ByteDecoder | None:
    """Rules for a decoder's JSON, or None where pieces can't be decoded one by one."""
    if decoder is None:
        return None
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [part["type"] for part in parts if part["type"] != "Fuse"]
    if kinds == ["ByteLevel"]:
        return ByteDecoder(byte_level=True)
    if kinds == ["Metaspace"]:
        keeps = parts[0].get("prepend_scheme") == "never"
        return ByteDecoder(space=parts[0]["replacement"], strip_first="" if keeps else "all")
    return _sentencepiece_rules(parts)


def _sentencepiece_rules(parts: list[dict[str, Any]]) -> ByteDecoder | None:
    """Rules for Replace, ByteFallback, Fuse and Strip, the decoder of sentencepiece models."""
    kinds = [part["type"] for part in parts]
    if kinds not in (
        ["Replace", "ByteFallback", "Fuse"],
        ["Replace", "ByteFallback", "Fuse", "Strip"],
        ["ByteFallback", "Fuse"],
    ):
        return None
    replace = parts[0] if kinds[0] == "Replace" else None
    if replace is not None and (
        replace["pattern"] != {"String": UNDERLINE} or replace["content"] != " "
    ):
        return None
    strip = parts[-1] if kinds[-1] == "Strip" else None
    if strip is not None and (strip["content"], strip["start"], strip["stop"]) != (" ", 1, 0):
        return None
    return ByteDecoder(
        space=UNDERLINE if replace else "",
        byte_fallback=True,
        strip_first="one" if strip else "",
    )
