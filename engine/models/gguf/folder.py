"""A GGUF file as a model folder: config.json, tokenizer and all, but for the weights.

What a file says beside its weights is written to the cache once, in the form that the engine and
the gateways read of any model.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError
from engine.models.gguf.config import make_config
from engine.models.gguf.reader import read_header
from engine.models.gguf.tokenizer import eos_token_ids, make_tokenizer, tokenizer_config
from engine.models.mapped import MappedFile
from engine.tokenizer_folder import cache_dir

SUFFIX = ".gguf"
_SOURCE = "source.json"
#: Of the form that is written; files of another one are written anew.
_FORM = 1


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that a path names: itself, or the only one of a folder without config.json.

    Raises `ModelLoadError` for a model that is split over several files.
    """
    found = path if path.is_file() and path.suffix == SUFFIX else None
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob(f"*{SUFFIX}"))
        if len(files) > 1:
            raise ModelLoadError(
                f"{path} holds {len(files)} GGUF files: name one of them.", param="model"
            )
        found = files[0] if files else None
    if found is not None and "-00001-of-" in found.name:
        raise ModelLoadError(
            f"{found} is one of several parts: merge them (gguf-split --merge).", param="model"
        )
    return found


def gguf_folder(path: Path, *, with_tokenizer: bool = True) -> Path:
    """The folder of a GGUF file, made where it isn't there yet.

    Raises `ModelLoadError` for a file that isn't sound, or that holds what isn't supported.
    """
    path = path.resolve()
    target = cache_dir() / "gguf" / _identity(path, with_tokenizer)
    if (target / _SOURCE).exists():
        return target
    file = MappedFile(path)
    header = read_header(file.buffer)
    config = make_config(header, file.buffer)
    # Beside it first: another replica may be at the same file.
    workplace = target.with_name(f"{target.name}.{os.getpid()}")
    workplace.mkdir(parents=True, exist_ok=True)
    if with_tokenizer:
        make_tokenizer(header).save(str(workplace / "tokenizer.json"))
        _write(workplace / "tokenizer_config.json", tokenizer_config(header))
        _write(workplace / "generation_config.json", {"eos_token_id": eos_token_ids(header)})
    _write(workplace / "config.json", config)
    _write(workplace / _SOURCE, {"file": str(path)})
    try:
        workplace.rename(target)
    except OSError:
        if not (target / _SOURCE).exists():
            raise
        shutil.rmtree(workplace)  # the other replica was first
    return target


def source_of(folder: Path) -> Path | None:
    """The GGUF file that a folder of `gguf_folder` was made from; None for other folders."""
    path = folder / _SOURCE
    if folder.parent != cache_dir() / "gguf" or not path.exists():
        return None
    return Path(json.loads(path.read_text(encoding="utf-8"))["file"])


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _identity(path: Path, with_tokenizer: bool) -> str:
    """Changes with the file's path, size and time."""
    stat = path.stat()
    parts = [str(path), str(stat.st_size), str(stat.st_mtime_ns), str(with_tokenizer), str(_FORM)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
