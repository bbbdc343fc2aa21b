"""The version of messages between gateways and replicas. Torch-free.

A release is compatible with those of the previous and the next version, in both directions, so that
gateways and replicas can be replaced one after the other:

- A new field has a default, which isn't sent. Unknown fields are ignored.
- Sampling parameters, which change a result, are never ignored: a replica that doesn't know one
  refuses the request with an error.
- Changes that the other side must know about raise the version.
"""

from __future__ import annotations

#: Messages without a version have version 1, the first.
MESSAGE_VERSION = 1


def is_compatible(version: int) -> bool:
    """Whether this release supports messages of a version: at most one more or less than its
    own.
    """
    return abs(version - MESSAGE_VERSION) <= 1
