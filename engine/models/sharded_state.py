"""`load_format=sharded_state`: a model's weights in files by rank, of a size that suits a disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.models.weights import WeightReader

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
MAX_BYTES = 5 * 1024**3


def checked_pattern(pattern: str | None) -> str:
    """The pattern of the files' names. Raises `InvalidRequest` for one that can't be."""
    pattern = pattern or PATTERN
    try:
        name = pattern.format(rank=0, part=0)
    except (KeyError, IndexError, ValueError) as error:
        raise InvalidRequest(
            f"pattern may hold {{rank}} and {{part}} alone, got {pattern!r}.", param="pattern"
        ) from error
    if Path(name).name != name or "{part}" not in pattern or "{rank}" not in pattern:
        raise InvalidRequest(
            f"pattern must be a file's name with {{rank}} and {{part}}, got {pattern!r}.",
            param="pattern",
        )
    return pattern


def read_sharded_state(folder: Path, pattern: str | None) -> WeightReader:
    """The files of rank 0. Raises `ModelLoadError` where there are none."""
    found = sorted(folder.glob(checked_pattern(pattern).format(rank=0, part="*")))
    if not found:
        raise ModelLoadError(
            f"{folder} holds no {(pattern or PATTERN).format(rank=0, part='*')}: make them with "
            "save_sharded_state.",
            param="model",
        )
    return WeightReader(folder, found)


def save_sharded_state(
    tensors: Mapping[str, Tensor],
    path: str | Path,
    pattern: str | None = None,
    max_size: int | str | None = MAX_BYTES,
) -> list[Path]:
    """Write tensors to a folder, files of at most `max_size` bytes (or of one tensor): the files.

    Raises `InvalidRequest` for a folder or size that can't be.
    """
    folder, pattern = Path(path), checked_pattern(pattern)
    try:
        limit = int(MAX_BYTES if max_size is None else max_size)
    except ValueError as error:
        raise InvalidRequest(
            f"max_size must be bytes, got {max_size!r}.", param="max_size"
        ) from error
    if limit < 1 or not folder.is_dir():
        what = (
            f"max_size must be at least 1, got {limit}." if limit < 1 else f"There is no {folder}."
        )
        raise InvalidRequest(what, param="max_size" if limit < 1 else "path")
    files: list[Path] = []
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > limit:
            files.append(_save(part, folder, pattern, len(files)))
            part, size = {}, 0
        part[name], size = tensor.contiguous(), size + tensor.nbytes
    if part:
        files.append(_save(part, folder, pattern, len(files)))
    return files


def _save(part: dict[str, Tensor], folder: Path, pattern: str, number: int) -> Path:
    file = folder / pattern.format(rank=0, part=number)
    save_file(part, str(file), metadata={"format": "pt"})
    return file
