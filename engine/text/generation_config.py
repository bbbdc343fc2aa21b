"""What a checkpoint's `generation_config.json` presets: EOS ids and sampling defaults."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.contract.errors import InvalidRequest
from engine.contract.generation_overrides import SAMPLING_DEFAULTS
from engine.contract.sampling_params import SamplingParams
from engine.text.files import parse_object, read_text

log = logging.getLogger(__name__)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json, or {} when there is none. Raises `ModelLoadError` if it's broken."""
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    return parse_object(read_text(path), path)


def eos_ids(generation: dict[str, Any], further: Iterable[int | None], vocab: int) -> list[int]:
    """Every id that ends an output, once: of the generation config first, then the others.

    `further` comes from config.json and from the tokenizer: a chat fine-tune's config.json often
    still names its base model's EOS, and only the tokenizer knows the one that ends a turn.
    """
    found = generation.get("eos_token_id")
    named = found if isinstance(found, list) else [found]
    ids = (token for token in [*named, *further] if type(token) is int and 0 <= token < vocab)
    return list(dict.fromkeys(ids))


def sampling_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """Sampling fields for requests that don't bring their own; values out of range are left out."""
    defaults: dict[str, Any] = {}
    for name in SAMPLING_DEFAULTS:
        value = generation.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidRequest as error:
            log.warning("generation_config.json: %s It isn't used.", error.message)
            continue
        defaults[name] = value
    return defaults
