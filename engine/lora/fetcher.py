"""`AdapterFetcher`: fetches files of adapters that aren't on this machine, by a command."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from engine.contract.errors import InvalidRequest
from engine.contract.lora import CONFIG_FILE, AdapterRef

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Maximum seconds for the command, which may download gigabytes.
_TIMEOUT_S = 600.0


class AdapterFetcher:
    """Runs a command that fetches an adapter and prints its path. Callable from any thread.

    The command is a separate process, so that neither its modules nor its download take memory or
    the GIL from steps.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """`command`: the command, to which a digest is appended."""
        self._command = tuple(command)
        self._paths: dict[str, Path] = {}

    def fetch(self, ref: AdapterRef) -> AdapterRef:
        """Return the adapter with a local path. Raises `InvalidRequest` if it can't be fetched."""
        path = self._paths.get(ref.digest, Path(ref.path))
        if not _is_adapter(path):
            path = self._paths[ref.digest] = self._run(ref)
        # Trimming of the cache keeps what was used last.
        with suppress(OSError):  # already trimmed, or on a read-only volume
            os.utime(path if path.is_dir() else path.parent)
        return msgspec.structs.replace(ref, path=str(path))

    def load(self, ref: AdapterRef, load: Callable[[AdapterRef], T]) -> T:
        """Return `load` of the fetched adapter. Raises `InvalidRequest`, and what `load` raises."""
        local = self.fetch(ref)
        try:
            return load(local)
        except (InvalidRequest, OSError):
            if _is_adapter(Path(local.path)):
                raise
        # Another process trimmed the cache before it noticed that the copy is in use.
        return load(self.fetch(ref))

    def _run(self, ref: AdapterRef) -> Path:
        try:
            done = subprocess.run(
                [*self._command, ref.digest],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=True,
            )
            return Path(done.stdout.splitlines()[-1])
        except (OSError, subprocess.SubprocessError, IndexError) as error:
            details = (getattr(error, "stderr", None) or str(error)).strip()
            log.error("The adapter %s can't be fetched: %s", ref.digest[:12], details)
            raise InvalidRequest(
                f"The adapter {ref.name or ref.digest[:12]!r} can't be fetched right now. The "
                "replica's log says why.",
                param="model",
            ) from error


def _is_adapter(path: Path) -> bool:
    return path.is_file() or (path / CONFIG_FILE).is_file()
