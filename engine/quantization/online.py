"""Online quantization: unquantized weights become kernels' codes at load (`fp8`, and nf4)."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear_factory import CodeFormat, CodeRows

_E4M3_MAX = 448.0
#: Quantiles of a normal distribution, scaled so that the largest is 1 (Dettmers et al., 2023).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
#: Values of `quantization` that all kernel sets support this way, unless they have another one.
CODE_FORMATS = {"fp8": CodeFormat("e4m3", 128), "nf4": CodeFormat("table", 64, NF4)}


def code_format(quantization: str | None, width: int) -> CodeFormat | None:
    """Return the kernels' codes for rows of `width` values; None if there are none."""
    form = CODE_FORMATS.get(quantization or "")
    if form is None or form.bits == 8:
        return form
    # Kernels have no 4-bit codes for incomplete groups.
    group = next((size for size in (form.group_size, 32, 16) if width % size == 0), None)
    return None if group is None else CodeFormat(form.kind, group, form.table)


def round_to_codes(weights: Tensor, form: CodeFormat) -> CodeRows:
    """Return the nearest codes of floats [n, K], with each group scaled by its largest value."""
    rows, width = weights.shape
    groups = -(-width // form.group_size)
    padded = torch.nn.functional.pad(weights.float(), (0, groups * form.group_size - width))
    grouped = padded.view(rows, groups, form.group_size)
    largest = _E4M3_MAX if form.kind == "e4m3" else 1.0
    scales = grouped.abs().amax(-1).clamp_(min=torch.finfo(torch.float32).tiny) / largest
    values = (grouped / scales[..., None]).clamp_(-largest, largest).view(rows, -1)[:, :width]
    if form.kind == "e4m3":
        return CodeRows(values.to(torch.float8_e4m3fn).view(torch.uint8), scales)
    table = torch.tensor(form.table)
    codes = torch.bucketize(values.contiguous(), (table[1:] + table[:-1]) / 2)
    return CodeRows(codes.to(torch.uint8), scales)
