"""config.json with the engine's settings put over it."""

from __future__ import annotations

from typing import Any

from engine.contract.config import EngineConfig

#: Rotary parameters by layer type: the settings mean these layers.
_FULL = "full_attention"


def with_overrides(raw: dict[str, Any], config: EngineConfig) -> dict[str, Any]:
    """`raw` with `hf_overrides`, then `rope_scaling` and `rope_theta`.

    Where layers rotate in different ways, scaling and base are those of full attention; layers with
    a window keep theirs.
    """
    raw = _merged(raw, config.hf_overrides or {})
    if config.rope_scaling is None and config.rope_theta is None:
        return raw
    found = raw.get("rope_parameters") or {}
    nested = isinstance(found.get(_FULL), dict)
    before = found[_FULL] if nested else found
    # The older names, where that is how this config.json says it.
    base = before.get("rope_theta") or raw.get("rope_theta")
    scaling = dict(before)
    if config.rope_scaling is not None:
        share = before.get("partial_rotary_factor")
        scaling = {**config.rope_scaling, **({"partial_rotary_factor": share} if share else {})}
    elif not before:
        scaling = dict(raw.get("rope_scaling") or {})
    theta = config.rope_theta if config.rope_theta is not None else base
    if theta is not None:
        scaling["rope_theta"] = theta
    kind = scaling.pop("type", None)
    scaling.setdefault("rope_type", kind or "default")
    parameters = {**found, _FULL: scaling} if nested else scaling
    raw = {**raw, "rope_parameters": parameters, "rope_scaling": None}
    return {**raw, "rope_theta": theta} if theta is not None else raw


def _merged(raw: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` put over `raw`; objects within are merged the same way."""
    merged = dict(raw)
    for name, value in over.items():
        inner = merged.get(name)
        if isinstance(inner, dict) and isinstance(value, dict):
            value = _merged(inner, value)
        merged[name] = value
    return merged
