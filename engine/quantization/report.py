"""What became of each layer's weights at load: `LayerReport`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.contract.replica_state import WeightsInfo
from engine.quantization.packing import WeightSource
from kernels import LinearLayer

Level = Literal["kept", "read"]
#: Of each matrix, first and last among them. More would leave holes in the heap, see `LoadBuffer`.
_ROWS = 4


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One packed layer.

    Attributes:
        layer: the checkpoint's names of its parts.
        format: of the checkpoint, of all of its parts.
        level: "kept": the kernels multiply by the checkpoint's own integers or floats; "read": they
            were rounded into another form while they were loaded, or are kept in more bits.
        nbytes: that a pass over it reads.
        error: the largest difference from the plain dequantised weights, in parts of the largest
            of these; over some rows.
    """

    layer: str
    format: str
    level: Level
    nbytes: int
    error: float


def layer_report(
    names: Sequence[str],
    matrices: Sequence[WeightSource],
    layer: LinearLayer,
    is_native: bool,
    device: torch.device,
    order: Tensor | None = None,
) -> LayerReport:
    """Of a layer made from matrices over each other.

    `order`: the layer's rows as numbers of the only matrix's; None: as they are.
    """
    is_unquantized = is_native and all(
        matrix.integers is matrix.native_format is None for matrix in matrices
    )
    formats = dict.fromkeys(matrix.source for matrix in matrices)
    return LayerReport(
        layer=_common_name(names),
        format=", ".join(formats),
        level="kept" if is_native else "read",
        nbytes=layer.nbytes,
        error=0.0 if is_unquantized else _error(matrices, layer, device, order),
    )


def _common_name(names: Sequence[str]) -> str:
    """a.b.q_proj and a.b.k_proj: a.b.q_proj+k_proj."""
    first, *rest = names
    return "+".join([first, *(name.rpartition(".")[2] for name in rest)])


@torch.no_grad()
def _error(
    matrices: Sequence[WeightSource], layer: LinearLayer, device: torch.device, order: Tensor | None
) -> float:
    above, lost, largest = 0, 0.0, 0.0
    for matrix in matrices:
        count = matrix.shape[0]
        rows = torch.linspace(0, count - 1, min(_ROWS, count)).long()
        weights = matrix.floats(rows if order is None else order[rows]).float().cpu()
        packed = layer.rows((rows + above).to(device))
        if packed.is_meta:  # nothing is computed there
            return 0.0
        packed = packed.cpu()
        lost = max(lost, float((packed - weights).abs().max()))
        largest = max(largest, float(weights.abs().max()))
        above += count
    return lost / largest if largest else lost


def summary(reports: Iterable[LayerReport]) -> list[WeightsInfo]:
    """By format and level, in the order of the first of each."""
    groups: dict[tuple[str, str], list[LayerReport]] = {}
    for report in reports:
        groups.setdefault((report.format, report.level), []).append(report)
    return [
        WeightsInfo(
            format=form,
            level=level,
            layers=len(same),
            nbytes=sum(report.nbytes for report in same),
            error=max(report.error for report in same),
        )
        for (form, level), same in groups.items()
    ]


def log_lines(reports: Iterable[LayerReport]) -> Iterator[str]:
    """For the log: layers whose names differ by numbers alone, and that fared alike, in one."""
    groups: dict[tuple[str, str, str], list[LayerReport]] = {}
    for report in reports:
        name = re.sub(r"\d+", "*", report.layer)
        groups.setdefault((name, report.format, report.level), []).append(report)
    for (name, form, level), same in groups.items():
        nbytes, error = sum(report.nbytes for report in same), max(report.error for report in same)
        count = f" ({len(same)})" if len(same) > 1 else ""
        yield f"{name}{count}: {form}, {level}, {nbytes / 1e6:.1f} MB, error at most {error:.1e}"
