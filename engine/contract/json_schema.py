"""What is done to a JSON schema before it becomes a grammar. Torch-free."""

from __future__ import annotations

from typing import Any


def close_objects(schema: Any) -> None:
    """Set `additionalProperties` to false where a schema with properties doesn't say, in place."""
    stack = [schema]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            if "properties" in item and "additionalProperties" not in item:
                item["additionalProperties"] = False
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
