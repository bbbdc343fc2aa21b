"""Reports of how layers' weights were converted at load."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from engine.contract.replica_state import LayerReport, WeightsInfo
from engine.quantization.packing import WeightSource
from kernels import LinearLayer

#: Number of sampled rows per matrix. More would fragment the heap, see `LoadBuffer`.
_ROWS = 4


def layer_report(
    names: Sequence[str],
    matrices: Sequence[WeightSource],
    layer: LinearLayer,
    is_native: bool,
    device: torch.device,
    order: Tensor | None = None,
) -> LayerReport:
    """Return the report of a layer made from concatenated matrices.

    `order`: numbers of the only matrix's rows in the layer's order; None: unchanged.
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
    """Join names: a.b.q_proj and a.b.k_proj become a.b.q_proj+k_proj."""
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
        if packed.is_meta:  # meta tensors have no values
            return 0.0
        packed = packed.cpu()
        lost = max(lost, float((packed - weights).abs().max()))
        largest = max(largest, float(weights.abs().max()))
        above += count
    return lost / largest if largest else lost


def summary(reports: Iterable[LayerReport]) -> list[WeightsInfo]:
    """Group reports by format and level, in order of first appearance."""
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
    """Return log lines; layers whose names differ only by numbers share one if results agree."""
    groups: dict[tuple[str, str, str], list[LayerReport]] = {}
    for report in reports:
        name = re.sub(r"\d+", "*", report.layer)
        groups.setdefault((name, report.format, report.level), []).append(report)
    for (name, form, level), same in groups.items():
        nbytes, error = sum(report.nbytes for report in same), max(report.error for report in same)
        count = f" ({len(same)})" if len(same) > 1 else ""
        yield f"{name}{count}: {form}, {level}, {nbytes / 1e6:.1f} MB, error at most {error:.1e}"
