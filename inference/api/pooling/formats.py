"""Vectors in a response: as numbers, as base64, or as raw bytes."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

from django.http import HttpResponse

from engine.contract.errors import InvalidRequest
from engine.contract.pooling_params import EmbedDtype, Endianness, Vectors, encode_vector

#: Maximum number of vectors described in a header: each takes over 100 characters, and HTTP clients
#: accept up to 64 KiB.
MAX_DESCRIBED = 256
BYTES, BYTES_ONLY = "bytes", "bytes_only"


def check_format(encoding: str | None, num_inputs: int) -> None:
    """Raise `InvalidRequest` for more vectors than a header can describe."""
    if encoding == BYTES and num_inputs > MAX_DESCRIBED:
        raise InvalidRequest(
            f"encoding_format 'bytes' describes each vector in a header, which holds "
            f"{MAX_DESCRIBED} of them, not {num_inputs}: send fewer inputs, or ask for "
            "'bytes_only' or 'base64'.",
            param="encoding_format",
        )


@dataclass(frozen=True, slots=True)
class VectorFormat:
    """Encoding of vectors: vLLM's `encoding_format`, `embed_dtype` and `endianness`."""

    encoding: str
    dtype: EmbedDtype
    endianness: Endianness

    @property
    def is_binary(self) -> bool:
        """Whether the response isn't JSON."""
        return self.encoding in (BYTES, BYTES_ONLY)

    def in_json(self, vector: Vectors) -> Any:
        """Numbers or base64."""
        if self.encoding == "base64":
            return base64.b64encode(encode_vector(vector, self.dtype, self.endianness)).decode()
        return vector.tolist()

    def response(self, vectors: list[Vectors], common: dict[str, Any]) -> HttpResponse:
        """All vectors, concatenated. With "bytes" the header `metadata` contains `common`, and the
        position and shape of each vector.
        """
        parts = [encode_vector(vector, self.dtype, self.endianness) for vector in vectors]
        body = b"".join(parts)
        response = HttpResponse(body, content_type="application/octet-stream")
        response["Content-Length"] = str(len(body))
        if self.encoding == BYTES:
            items, start = [], 0
            for index, (vector, part) in enumerate(zip(vectors, parts, strict=True)):
                end = start + len(part)
                items.append(
                    {
                        "index": index,
                        "embed_dtype": self.dtype,
                        "endianness": self.endianness,
                        "start": start,
                        "end": end,
                        "shape": vector.shape,
                    }
                )
                start = end
            response["metadata"] = json.dumps(common | {"data": items})
        return response
