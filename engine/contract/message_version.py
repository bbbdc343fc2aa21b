"""The version of messages between gateways and replicas. Torch-free.

A release works with those of the version before and after its own, in both directions, so that
gateways and replicas can be replaced one after the other:

- A new field has a default, which isn't sent. Who doesn't know a field ignores it.
- Parameters of sampling, which change a result, are never ignored: a replica that doesn't know one
  refuses the request and says so.
- Changes that others must know of raise the version.
"""

from __future__ import annotations

#: Messages without a version have version 1, the first.
MESSAGE_VERSION = 1


def is_compatible(version: int) -> bool:
    """Whether this release works with messages of a version: one more or less than its own."""
    return abs(version - MESSAGE_VERSION) <= 1
