"""The files of one model: llama.cpp splits large ones, the metadata in the first."""

from __future__ import annotations

import re
from pathlib import Path

from engine.contract.errors import ModelLoadError
from engine.models.gguf.reader import Header, TensorInfo, broken, read_header
from engine.models.mapped import MappedFile

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def parts_of(path: Path) -> list[Path]:
    """All files of the model that `path` is a part of, in order; itself where it's whole.

    Raises `ModelLoadError` when one of them is missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    named = [f"{stem}-{part:05}-of-{count}.gguf" for part in range(1, int(count) + 1)]
    found = [path.with_name(name) for name in named]
    missing = [part.name for part in found if not part.is_file()]
    if missing or path not in found:
        raise ModelLoadError(
            f"{path} is a part of a model whose file {(missing or [path.name])[0]} isn't there.",
            param="model",
        )
    return found


class GGUFFiles:
    """A model's files, mapped, and their headers as one.

    Raises `ModelLoadError` for files that aren't sound, or aren't parts of one model.

    Attributes:
        header: metadata of the first file, tensors of all.
        size: bytes of all files.
    """

    def __init__(self, path: Path) -> None:
        self._files = [MappedFile(part) for part in parts_of(path)]
        headers = [read_header(file.buffer) for file in self._files]
        self._part_of: dict[str, int] = {}
        tensors: dict[str, TensorInfo] = {}
        for part, header in enumerate(headers):
            _check_part(header, part, len(headers))
            twice = tensors.keys() & header.tensors.keys()
            if twice:
                raise broken(f"{min(twice)!r} is in two of its parts")
            tensors |= header.tensors
            self._part_of |= dict.fromkeys(header.tensors, part)
        self.header = Header(headers[0].metadata, tensors)

    def file_of(self, tensor: str) -> MappedFile:
        """The file that a tensor lies in."""
        return self._files[self._part_of[tensor]]

    def bytes_of(self, tensor: str) -> bytes:
        """A copy of a tensor's bytes."""
        info = self.header.tensors[tensor]
        return self.file_of(tensor).buffer[info.offset : info.offset + info.nbytes]

    def release(self) -> None:
        """Give back the memory of what has been read; tensors stay valid."""
        for file in self._files:
            file.release()


def _check_part(header: Header, part: int, count: int) -> None:
    said = header.metadata.get("split.count", 0)
    if not isinstance(said, int):
        raise broken("split.count is no number")
    number = header.metadata.get("split.no")
    number = number if isinstance(number, int) else None
    if (count > 1 or said) and (said, number) != (count, part):
        if count == 1 and said == 1:
            return
        raise broken(f"it is part {number} of {said}, and not part {part} of {count}")
