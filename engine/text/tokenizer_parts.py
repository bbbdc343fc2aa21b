"""What a part of a `tokenizer.json` does, however it was written down.

Libraries write a tokenizer that they loaded in their own way: with settings that a part has no use
for, one step as a sequence of one, nothing as an empty text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: Settings that say nothing, by the part and its type: offsets are a post-processor's, and a
#: decoder of bytes splits no text.
_IDLE = {
    ("pre_tokenizer", "ByteLevel"): ("trim_offsets",),
    ("decoder", "ByteLevel"): ("add_prefix_space", "trim_offsets", "use_regex"),
}
#: Of a model by merges: none, nothing and never are the same.
_EMPTY = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "dropout": 0.0}


def meaning(part: str, written: Any) -> Any:
    """The same for all ways to write down a normalizer, pre_tokenizer, model or decoder that does
    the same; `part`: which of them.
    """
    steps = list(_steps(part, written))
    if len(steps) < 2:
        return steps[0] if steps else None
    return {"type": "Sequence", "steps": steps}


def _steps(part: str, written: Any) -> Iterator[Any]:
    """One after the other, none of them a sequence."""
    if not isinstance(written, Mapping):
        yield from () if written is None else (written,)
    elif written.get("type") == "Sequence":
        for inner in next((value for value in written.values() if isinstance(value, list)), []):
            yield from _steps(part, inner)
    else:
        idle = _IDLE.get((part, written.get("type", "")), ())
        kept = {name: value for name, value in written.items() if name not in idle}
        if kept.get("type") == "BPE":
            kept |= {name: None for name, nothing in _EMPTY.items() if kept.get(name) == nothing}
        yield kept
