"""PyTorch's files turned into safetensors, by a process of limited time and memory. Torch-free.

Such a file is a pickle. The process reads tensors alone (`weights_only`); what a file does to it
beyond that stays there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_PROGRAM = "engine.checkpoints.convert_torch"
_ROOT = Path(__file__).resolve().parents[2]
#: Seconds to start, with PyTorch; and bytes that even a slow disk reads and writes in one.
_START_S, _MIN_BYTES_PER_S = 120, 20_000_000


class ConversionError(ValueError):
    """A file can't be read as weights alone."""


def convert_torch_files(files: Sequence[Path], folder: Path) -> None:
    """Write the tensors of PyTorch files into a folder, as safetensors files of up to 1 GiB.

    Raises `ConversionError` for a file that isn't sound, `OSError` where the folder can't be
    written.
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
