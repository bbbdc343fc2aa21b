"""A hub of models on this machine: the part of its HTTP interface that downloads need.

`cut_after`: a body that is longer is cut off there, until `cuts` of them were; so a download breaks
as it does when a line does.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

COMMIT = "c" * 40


class Hub:
    """Serves repositories from folders: one, and perhaps others.

    `asked`: (method, path, Range) of each request. `cards`: what a search says, by repository.
    """

    def __init__(
        self,
        repository: str,
        folder: Path,
        *,
        other_folders: Mapping[str, Path] | None = None,
        cut_after: int = 0,
        cuts: int = 0,
    ) -> None:
        self.folder = folder
        self.folders = {repository: folder, **(other_folders or {})}
        self.cut_after, self.cuts = cut_after, cuts
        self.asked: list[tuple[str, str, str]] = []
        self.cards: dict[str, dict[str, Any]] = {}
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def files(self) -> list[Path]:
        """Files of the first repository."""
        return list(files_of(self.folder).values())


def files_of(folder: Path) -> dict[str, Path]:
    """A repository's files by their names in it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[Hub]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.asked.append((self.command, path, self.headers.get("Range", "")))
        if path == "/api/models":
            words = parse_qs(urlsplit(self.path).query).get("search", [""])[0]
            self._json([{"id": name, **card} for name, card in hub.cards.items() if words in name])
            return
        for repository, folder in hub.folders.items():
            api = f"/api/models/{repository}"
            if path in (api, f"{api}/revision/main"):
                siblings = [
                    {"rfilename": name, "size": file.stat().st_size}
                    for name, file in files_of(folder).items()
                ]
                self._json({"id": repository, "sha": COMMIT, "siblings": siblings})
                return
            if path == f"{api}/tree/{COMMIT}":
                self._json([_entry(file, name) for name, file in files_of(folder).items()])
                return
            if match := re.fullmatch(rf"/{re.escape(repository)}/resolve/[^/]+/(.+)", path):
                self._file(folder / match[1], body=body)
                return
        self._json({"error": "Repository not found"}, 404)

    def _json(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _file(self, path: Path, *, body: bool) -> None:
        if not path.is_file():
            self._json({"error": "Entry not found"}, 404)
            return
        data = path.read_bytes()
        first, end = 0, len(data)
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, end = int(match[1]), min(int(match[2] or end) + 1, len(data))
        rest = data[first:end]
        part = len(rest) < len(data)
        self.send_response(206 if part else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(rest)))
        if part:
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        if self.hub.cuts and 0 < self.hub.cut_after < len(rest):
            self.hub.cuts -= 1
            self.wfile.write(rest[: self.hub.cut_after])
            self.close_connection = True
            return
        self.wfile.write(rest)


def _entry(path: Path, name: str) -> dict[str, Any]:
    data = path.read_bytes()
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    return {"type": "file", "path": name, "size": len(data), "oid": oid}
