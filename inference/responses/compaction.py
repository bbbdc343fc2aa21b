"""A conversation made short: a summary by its model, sealed for its tenant.

The client gets one item, which it sends back in place of the conversation. What is in it only this
installation can read, and only for the tenant that it was made for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from cryptography.fernet import InvalidToken

from engine.contract.errors import InvalidRequest
from tenants.shown_once import boxes

KIND = "compaction"
_HEAD = "Summary of the conversation so far:\n\n"
#: Of a sealed summary, in characters.
MAX_SEALED = 1 << 20


def sealed(summary: str, tenant_id: int) -> str:
    """The summary as clients keep it."""
    text = json.dumps({"tenant": tenant_id, "summary": summary})
    return boxes(KIND).encrypt(text.encode()).decode()


def opened(items: Iterable[dict[str, Any]], tenant_id: int, param: str) -> list[dict[str, Any]]:
    """The items, with a system message for each compaction.

    Raises: `InvalidRequest` for one that isn't this installation's and this tenant's.
    """
    return [
        _message(item, tenant_id, f"{param}[{place}].encrypted_content")
        if item.get("type") == KIND
        else item
        for place, item in enumerate(items)
    ]


def _message(item: dict[str, Any], tenant_id: int, param: str) -> dict[str, Any]:
    content = item.get("encrypted_content")
    refused = InvalidRequest(
        "This compaction wasn't made on this installation for your tenant.", param=param
    )
    if not isinstance(content, str) or len(content) > MAX_SEALED or not content.isascii():
        raise refused
    try:
        found = json.loads(boxes(KIND).decrypt(content.encode()))
    except InvalidToken:
        raise refused from None
    if found["tenant"] != tenant_id:
        raise refused
    return {"type": "message", "role": "system", "content": _HEAD + found["summary"]}
