"""The body of a batch of messages, read one request after the other.

Anthropic takes 256 MB in one JSON object. Here it's a file on disk, and no more of it than one
request is in memory at a time.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from typing import IO, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from engine.contract.errors import InvalidRequest
from inference.errors import PayloadTooLarge
from inference.settings import gateway_settings
from inference.validation import describe_validation_error
from inference.web.json_body import parse_object

Bytes = bytes | mmap.mmap

#: A body up to this size isn't mapped.
SMALL_BYTES = 1 << 20
_HEAD = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*"requests"\s*:\s*\[\s*(?=\{)')
#: A string, a bracket, or the beginning of a string without an end.
_MARK = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]', re.DOTALL)
_NEXT = re.compile(rb"\s*,\s*(?=\{)")
_END = re.compile(rb"\s*\]\s*\}\s*\Z")
_OPENING, _CLOSING = frozenset(b"{["), frozenset(b"}]")


class OneRequest(BaseModel):
    """A message to make. `params`: the body of `/v1/messages`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    custom_id: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: dict[str, Any]


class BatchOfMessages(BaseModel):
    """A batch."""

    model_config = ConfigDict(strict=True, extra="forbid")

    requests: Annotated[list[OneRequest], Field(min_length=1)]


def mapped(file: IO[bytes]) -> Bytes:
    """A body's bytes; a large one's stay on disk."""
    if file.seek(0, 2) > SMALL_BYTES:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    file.seek(0)
    return file.read()


def requests_in(data: Bytes) -> Iterator[OneRequest]:
    """The requests in their order.

    Raises: `InvalidRequest` naming what is wrong with the body or with one of them;
    `PayloadTooLarge` for one that is larger than a body of its own may be.
    """
    head = _HEAD.match(data)
    if head is None:
        raise _refusal(data)
    place, number = head.end(), 0
    while True:
        end = _end_of(data, place, number)
        yield _request(data[place:end], number)
        following = _NEXT.match(data, end)
        if following is None:
            break
        place, number = following.end(), number + 1
    if _END.match(data, end) is None:
        raise _refusal(data)


def _end_of(data: Bytes, start: int, number: int) -> int:
    """Behind the object that begins there."""
    most, depth = gateway_settings().max_body_bytes, 0
    for mark in _MARK.finditer(data, start, start + most):
        sign = data[mark.start()]
        if sign in _OPENING:
            depth += 1
        elif sign in _CLOSING:
            depth -= 1
            if depth == 0:
                return mark.end()
        elif mark.end() == mark.start() + 1:  # looking on would take its square
            break
    if start + most < len(data):
        raise PayloadTooLarge(
            f"A request of a batch may have {most} bytes.", param=f"requests[{number}]"
        )
    raise _no_json()


def _request(text: bytes, number: int) -> OneRequest:
    parsed = parse_object(text, gateway_settings().max_json_depth)
    try:
        return OneRequest.model_validate(parsed)
    except ValidationError as error:
        told = describe_validation_error(error)
        told["param"] = f"requests[{number}].{told['param']}"
        raise InvalidRequest(**told) from None


def _refusal(data: Bytes) -> InvalidRequest:
    """Why this body is no batch. Raises what says it better."""
    settings = gateway_settings()
    if len(data) <= SMALL_BYTES:
        BatchOfMessages.model_validate(parse_object(bytes(data), settings.max_json_depth))
    return _no_json()


def _no_json() -> InvalidRequest:
    return InvalidRequest(
        'The body must be {"requests": [...]}, each entry an object.',
        param="requests",
        code="invalid_json",
    )
