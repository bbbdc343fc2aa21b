"""Conversion of PyTorch's files to safetensors in a process of limited time and memory. Torch-free.

Such a file is a pickle. The process reads only tensors (`weights_only`), and whatever else a file
might do affects only that process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_PROGRAM = "engine.checkpoints.convert_torch"
_ROOT = Path(__file__).resolve().parents[2]
#: Seconds to start, including PyTorch; and bytes per second that even a slow disk achieves.
_START_S, _MIN_BYTES_PER_S = 120, 20_000_000


class ConversionError(ValueError):
    """A file contains more than weights, or is invalid."""


def convert_torch_files(files: Sequence[Path], folder: Path) -> None:
    """Write the tensors of PyTorch files into a folder, as safetensors files of up to 1 GiB.

    Raises `ConversionError` for an invalid file, and `OSError` if the folder isn't writable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = sum(file.stat().st_size for file in files)
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", _PROGRAM, str(folder), *map(str, files)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONPATH": path},
            timeout=_START_S + size / _MIN_BYTES_PER_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConversionError(
            f"{files[0]} took over {error.timeout:.0f} seconds to read."
        ) from error
    if done.returncode:
        lines = done.stdout.strip().splitlines() or [f"reading it ended by {done.returncode}."]
        raise ConversionError(lines[-1] if done.stdout else f"{files[0]}: {lines[-1]}")
