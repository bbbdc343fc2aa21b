"""Estimates the memory that a model's replicas will take on this machine."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from django.template.defaultfilters import filesizeformat

from catalog.model_details import checkpoint_of
from catalog.models import ServedModel
from catalog.sizing import estimate_memory
from engine.system.host import total_memory


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a model's replicas.

    Attributes:
        text: replicas, their ranks and their estimated memory beside the machine's, as a phrase.
        fits: whether the machine has as much memory, free or not.
        fits_again: whether the free memory suffices for as many replicas once more.
    """

    text: str
    fits: bool
    fits_again: bool


def plan_memory(
    model: ServedModel, node: str = "", predecessor_tokens: int = 0
) -> MemoryPlan | None:
    """Plan the replicas that `node` (default: this host) is to run. `predecessor_tokens`: size of
    the KV cache of each one's predecessor.

    Returns None where none of them is here, or their memory can't be told: on a GPU, or without the
    checkpoint's files. Raises `ConfigError` for invalid settings.
    """
    checkpoint = checkpoint_of(model.source, model.settings)
    is_local = model.node in ("", node or socket.gethostname())
    if checkpoint is None or not model.runs_on_cpu or not is_local:
        return None
    # A KV cache without a configured size uses the remaining memory.
    need = estimate_memory(
        checkpoint, model.replica_settings(0), sequences=0, predecessor_tokens=predecessor_tokens
    )
    count = model.num_replicas + model.num_spares
    total = count * need.total
    processes = f"{count} replica{'s' if count > 1 else ''}"
    if need.num_ranks > 1:
        processes += f" of {need.num_ranks} ranks, {filesizeformat(need.per_rank)} in each"
    text = (
        f"{processes}: about {filesizeformat(total)} of "
        f"{filesizeformat(total_memory())} on {need.host}, where "
        f"{filesizeformat(need.available)} are free"
    )
    return MemoryPlan(text, total <= total_memory(), total <= need.available)
