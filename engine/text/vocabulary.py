"""Decoding of vocabulary pieces to bytes.

Decoders of nearly all current models map each token to bytes separately, and decode the bytes as
UTF-8. For these (`byte_decoder` recognizes them) decoding is concatenation: O(1) per token, and a
stream yields exactly the text of decoding everything at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
UNDERLINE = "▁"


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's printable characters for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


_ALPHABET = _byte_level_alphabet()
_CHARACTERS = {byte: char for char, byte in _ALPHABET.items()}


def byte_level_token(data: bytes) -> str:
    """Decode GPT-2's byte alphabet."""
    return "".join(_CHARACTERS[byte] for byte in data)


@dataclass(frozen=True, slots=True)
class ByteDecoder:
    """How a decoder converts pieces to bytes.

    Attributes:
        byte_level: pieces are written in GPT-2's byte alphabet.
        space: the character for a space, or "".
        byte_fallback: `<0xE2>` is a byte.
        strip_first: what the text's first piece loses: "", "one" space, or "all" of them.
    """

    byte_level: bool = False
    space: str = ""
    byte_fallback: bool = False
    strip_first: str = ""

    def to_bytes(self, piece: str) -> bytes:
        """Return the bytes of a piece that doesn't start the text."""
        if self.byte_level:
            try:
                return bytes([_ALPHABET[char] for char in piece])
            except KeyError:
                return piece.encode()
        if self.byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return piece.replace(self.space, " ").encode() if self.space else piece.encode()

    def first_bytes(self, piece: str) -> bytes:
        """Return the bytes of the text's first piece."""
        if self.strip_first == "all":
            return piece.replace(self.space, "").encode()
        data = self.to_bytes(piece)
        return data.removeprefix(b" ") if self.strip_first == "one" else data


def byte_decoder(decoder: dict[str, Any] | None) -> ByteDecoder | None:
    """Return rules from a decoder's JSON; None if pieces can't be decoded separately."""
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
    """Return rules for Replace, ByteFallback, Fuse and Strip, SentencePiece's decoder."""
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
