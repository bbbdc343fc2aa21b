"""What plans name by handle: what isn't data, or too large to be sent with every plan."""

from __future__ import annotations

from typing import Any


class Attachments:
    """Objects by handle. Handles are never used twice."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._held)

    def put(self, value: Any) -> int:
        """Hold an object; its handle."""
        handle = self._next
        self._next += 1
        self._held[handle] = value
        return handle

    def get(self, handle: int) -> Any:
        """The object. Raises KeyError for a handle that isn't held (any more)."""
        return self._held[handle]

    def drop(self, handle: int) -> None:
        """Let an object go; one that went already is no error."""
        self._held.pop(handle, None)
