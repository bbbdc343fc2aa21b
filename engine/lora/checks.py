"""What is asked of an adapter's tensors whatever they are."""

from __future__ import annotations

from typing import Any

from engine.contract.adapters import WEIGHTS_FILE
from engine.contract.checks import shown
from engine.contract.errors import InvalidRequest

_DTYPES = ("F32", "BF16", "F16")


def wrong(name: str, why: str, file: str = WEIGHTS_FILE) -> InvalidRequest:
    """The refusal of a tensor, by its name."""
    return InvalidRequest(f"{file}: {shown(name)} {why}.", param=name[:200])


def check_entry(name: str, entry: Any) -> None:
    """Raise for a dtype that an adapter's weights don't have; `entry` is of safetensors."""
    if entry.get_dtype() not in _DTYPES:
        raise wrong(name, f"is kept as {entry.get_dtype()}, which isn't supported")


def misshapen(shape: tuple[int, ...], wanted: tuple[int, ...], vocab: int = 0) -> str:
    """Why a shape is refused. `vocab`: of a table or what changes one, the rows that it has."""
    if vocab in wanted and len(shape) == len(wanted):
        at = wanted.index(vocab)
        if shape[:at] + shape[at + 1 :] == wanted[:at] + wanted[at + 1 :]:
            return (
                f"is for a vocabulary of {shape[at]} tokens, but the adapter's table is for {vocab}"
            )
    return f"has shape {list(shape)}, but it must be {list(wanted)}"


def check_rank(rank: int, most: int | None) -> None:
    """Raise for a rank over what the operator allows; None: any."""
    if most is not None and rank > most:
        raise InvalidRequest(
            f"The adapter's rank {rank} is over max_lora_rank ({most}).", param="r"
        )
