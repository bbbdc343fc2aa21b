"""`TensorFile`: the tensors of a safetensors file, read as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.lora.checks import wrong

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

#: The integer of a float's size, and what infinity is as one.
_BITS = {
    torch.float32: (torch.int32, 0x7F80 << 16),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}
#: Values that are looked at together.
_AT_ONCE = 1 << 18


class TensorFile:
    """A file that `safe_open` has found sound.

    An adapter has hundreds of small tensors, each of which takes longer to ask for than to read.
    Where all are floats of one kind they lie in one tensor, of which they are views; else they are
    read one by one.
    """

    def __init__(self, path: Path, file: Any) -> None:
        """`file`: it, opened by `safe_open`."""
        self._file = file
        self._views: dict[str, Tensor] = {}
        #: Whether all of it is numbers, so that no tensor need be asked.
        self._finite = False
        try:
            self._open_whole(path)
        except (ValueError, KeyError, TypeError, RuntimeError):
            self._views = {}  # it was replaced meanwhile, which the reader finds in the end

    def _open_whole(self, path: Path) -> None:
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(length))
        header.pop("__metadata__", None)
        kinds = {entry["dtype"] for entry in header.values()}
        dtype = _DTYPES.get(kinds.pop()) if len(kinds) == 1 else None
        start, end = 8 + length, path.stat().st_size
        if dtype is None or start % dtype.itemsize or end <= start:
            return
        whole = torch.from_file(str(path), shared=False, size=end, dtype=torch.uint8)
        values = whole[start:].view(dtype)
        self._finite = all_finite(values)
        for name, entry in header.items():
            first, last = (offset // dtype.itemsize for offset in entry["data_offsets"])
            self._views[name] = values[first:last].view(entry["shape"])

    def read(self, name: str) -> Tensor:
        """A tensor. Raises `InvalidRequest` unless all of it is numbers."""
        tensor = self._views.get(name)
        if tensor is None:
            tensor = self._file.get_tensor(name)
        if not self._finite and not all_finite(tensor):
            raise wrong(name, "holds NaN or infinity")
        return tensor


def all_finite(values: Tensor) -> bool:
    """Whether no exponent is all ones. By integers, which are compared far faster than narrow
    floats, and in one thread: the others compute a step meanwhile.
    """
    bits, infinity = _BITS[values.dtype]
    whole = values.contiguous().view(bits).numpy().reshape(-1)
    return all(
        (whole[at : at + _AT_ONCE] & torch.iinfo(bits).max).max() < infinity
        for at in range(0, len(whole), _AT_ONCE)
    )
