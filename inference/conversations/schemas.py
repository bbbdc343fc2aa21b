"""Bodies of `/v1/conversations`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from engine.contract.errors import InvalidRequest
from inference.batches.schemas import BatchMetadata
from inference.responses.items import Messages, kept_items
from inference.responses.schemas import InputItem

#: Items of one request, as OpenAI has it.
MAX_ITEMS = 20

Items = Annotated[list[InputItem], Field(max_length=MAX_ITEMS)]


class NewConversation(BaseModel):
    """A conversation, with its first items."""

    model_config = ConfigDict(strict=True, extra="forbid")

    items: Items | None = None
    metadata: BatchMetadata | None = None


class ConversationChange(BaseModel):
    """What of a conversation can be changed."""

    model_config = ConfigDict(strict=True, extra="forbid")

    metadata: BatchMetadata | None


class NewItems(BaseModel):
    """Items to add."""

    model_config = ConfigDict(strict=True, extra="forbid")

    items: Annotated[Items, Field(min_length=1)]


def checked_items(items: list[InputItem] | None) -> list[dict[str, Any]]:
    """Items as they are kept. Raises `InvalidRequest` for those that no model could read."""
    found = [item.model_dump(exclude_unset=True) for item in items or ()]
    try:
        Messages().add_all(item for item in found if item.get("type") != "compaction")
    except InvalidRequest as error:
        if error.param is not None and error.param.startswith("input["):
            error.rename("items" + error.param.removeprefix("input"))
        raise
    return kept_items(found)
