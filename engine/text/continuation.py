"""`continue_final_message`: leave the last message open, so that the model goes on with it."""

from __future__ import annotations

from engine.contract.errors import InvalidRequest
from engine.text.messages import REASONING_FIELDS, Message

#: Marks the end of the final message; what a template writes after it is cut off. The space shows
#: whether the template trims messages.
TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_PARAM = "continue_final_message"


def open_final_message(
    messages: list[Message], field: str, source: str
) -> tuple[list[Message], str]:
    """The messages with the last one's `field` tagged, and that field's text.

    Raises:
        InvalidRequest: the field isn't there, holds no text, or the template never reads it.
    """
    final = dict(messages[-1])
    value = final.get(field)
    if value is None:
        raise InvalidRequest(f"The final message has no {field!r} to continue.", param=_PARAM)
    fields = [field]
    if field in REASONING_FIELDS:
        fields = [name for name in REASONING_FIELDS if final.get(name) == value]
    if not any(name in source for name in fields):
        raise InvalidRequest(f"The chat template never reads {field!r}.", param=_PARAM)
    if isinstance(value, list):
        parts = [dict(part) for part in value]
        texts = [part for part in parts if isinstance(part.get("text"), str)]
        if not texts:
            raise InvalidRequest("The final message has no text to continue.", param=_PARAM)
        text = texts[-1]["text"]
        texts[-1]["text"] += TAG
        final[field] = parts
    elif isinstance(value, str):
        text = value
        final |= dict.fromkeys(fields, value + TAG)
    else:
        raise InvalidRequest("The final message has no text to continue.", param=_PARAM)
    return [*messages[:-1], final], text


def cut_at_tag(rendered: str, final_text: str) -> str:
    """The rendered chat up to the end of the final message.

    Raises:
        InvalidRequest: the template dropped or changed the final message.
    """
    tag = TAG.strip()
    if final_text.strip() not in rendered or tag not in rendered:
        raise InvalidRequest(
            "The chat template changes the final message, so it can't be continued.", param=_PARAM
        )
    place = rendered.rindex(tag)
    kept = rendered[:place]
    # Without the tag's own space the template trimmed the message, so it ends without spaces.
    return kept if rendered.startswith(TAG, place) else kept.rstrip()
