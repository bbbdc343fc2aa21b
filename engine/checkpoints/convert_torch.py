"""Program that converts PyTorch's files to safetensors.

`python -m engine.checkpoints.convert_torch FOLDER FILE...`: an error is printed to stdout in one
line, with exit status 1.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoints.load_format import save_sharded_state
from engine.contract.errors import QuireError
from engine.system.worker_process import limit_memory

#: Memory besides twice the largest file: one output file, and PyTorch itself.
_EXTRA_BYTES = 4 << 30
_MAX_PART_BYTES = 1 << 30
#: Tensors that share memory are written separately. In valid checkpoints these are tied embeddings.
_MAX_GROWTH = 2


def main(folder: Path, files: list[Path]) -> None:
    """Convert the files. Raises `ValueError` for an invalid one."""
    limit_memory(2 * max(file.stat().st_size for file in files) + _EXTRA_BYTES)
    for number, file in enumerate(files):
        pattern = f"{number:05}-{{rank}}-{{part}}.safetensors"
        save_sharded_state(read_tensors(file), folder, pattern, _MAX_PART_BYTES)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return a file's tensors by name, backed by the file. Raises `ValueError` if it is invalid."""
    try:
        try:
            content: Any = torch.load(  # noqa: TID251
                file, map_location="cpu", weights_only=True, mmap=True
            )
        except (RuntimeError, ValueError):  # the format of before 2020 can't be mapped
            content = torch.load(file, map_location="cpu", weights_only=True)  # noqa: TID251
    except Exception as error:  # torch raises a dozen kinds for invalid files
        lines = str(error).strip().splitlines() or [repr(error)]
        raise ValueError(f"{file} can't be read as weights alone: {lines[0]}") from error
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    ):
        raise ValueError(f"{file} holds something else than tensors by name.")
    num_bytes = 0
    for name, tensor in content.items():
        if tensor.layout != torch.strided or tensor.nbytes > tensor.untyped_storage().nbytes():
            raise ValueError(f"{file}: {name!r} is no dense tensor of the file's own bytes.")
        num_bytes += tensor.nbytes
    if num_bytes > _MAX_GROWTH * file.stat().st_size:
        raise ValueError(f"{file}: its tensors would take {num_bytes} bytes.")
    return {name: tensor.detach() for name, tensor in content.items()}


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
    except (OSError, QuireError, RuntimeError, ValueError) as error:
        print(" ".join(str(error).split()))
        sys.exit(1)
