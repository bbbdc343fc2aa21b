"""What is asked of an adapter's tensors whatever they are."""

from __future__ import annotations

from typing import Any

from engine.contract.adapters import WEIGHTS_FILE
from engine.contract.checks import shown
from engine.contract.errors import InvalidRequest

_DTYPES = ("F32", "BF16", "F16")


def wrong(name: str, why: str) -> InvalidRequest:
    """The refusal of a tensor, by its name."""
    return InvalidRequest(f"{WEIGHTS_FILE}: {shown(name)} {why}.", param=name[:200])


def check_entry(name: str, entry: Any) -> None:
    """Raise for a dtype that an adapter's weights don't have; `entry` is of safetensors."""
    if entry.get_dtype() not in _DTYPES:
        raise wrong(name, f"is kept as {entry.get_dtype()}, which isn't supported")


def check_rank(rank: int, most: int | None) -> None:
    """Raise for a rank over what the operator allows; None: any."""
    if most is not None and rank > most:
        raise InvalidRequest(
            f"The adapter's rank {rank} is over max_lora_rank ({most}).", param="r"
        )
