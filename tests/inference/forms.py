"""Multipart forms, as clients send files."""

from __future__ import annotations

from typing import Any

from tests.inference.asgi_client import AsgiClient, Reply

BOUNDARY = "quire-test-boundary"
HEADERS = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def form(fields: dict[str, str], files: dict[str, tuple[str, bytes]]) -> bytes:
    """The body of a form."""
    out = b""
    for name, value in fields.items():
        out += f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode()
        out += value.encode() + b"\r\n"
    for name, (filename, data) in files.items():
        out += (
            f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; '
            f'filename="{filename}"\r\nContent-Type: application/octet-stream\r\n\r\n'
        ).encode()
        out += data + b"\r\n"
    return out + f"--{BOUNDARY}--\r\n".encode()


async def upload(
    client: AsgiClient, data: bytes, *, filename: str = "in.jsonl", **fields: Any
) -> Reply:
    """`POST /v1/files`."""
    body = form({"purpose": "batch", **fields}, {"file": (filename, data)})
    return await client.post("/v1/files", body, headers=HEADERS)
