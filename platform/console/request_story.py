"""A request's record as its page and the API tell it."""

from __future__ import annotations

from typing import Any

import msgspec

from metering.models import RequestEntry
from metering.requests.access import Reader, access_content
from metering.requests.note import OutputNote, RequestNote, read_note
from tenants.actors import as_actor


def story_of(reader: Reader, entry: RequestEntry) -> dict[str, Any]:
    """Everything but the columns. Of what others had running only an operator sees how much."""
    note = read_note(entry.detail)
    content = access_content(reader, entry)
    operator = as_actor(reader).is_operator
    return {
        "message": note.message,
        "numerics_changed": note.numerics_changed,
        "admitted_ms": note.admitted_ms,
        "limits": note.limits,
        "sampling": note.asked,
        "price": _price(note),
        "hops": msgspec.to_builtins(note.hops),
        "outputs": [_output(each, operator=operator) for each in note.outputs],
        "tokens_over_time": note.tokens,
        "content": None
        if content is None
        else {"prompt": content.prompt, "answer": content.answer},
    }


def _price(note: RequestNote) -> dict[str, str]:
    """Of a million tokens, in the currency."""
    names = ("input", "cached", "output")
    return {
        name: f"{picos / 10**6:.6f}".rstrip("0").rstrip(".")
        for name, picos in zip(names, note.rates, strict=True)
    }


def _output(note: OutputNote, *, operator: bool) -> dict[str, Any]:
    shown = {name: getattr(note, name) for name in note.__struct_fields__}
    own, everybody = shown.pop("ahead_own"), shown.pop("ahead")
    shown["ahead"] = {"own": own, "others": everybody > own}
    if operator:
        shown["ahead"]["num_others"] = everybody - own
    return shown
