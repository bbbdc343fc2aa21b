"""A GGUF file as a model folder with everything except the weights.

The file's metadata is written to the cache once, as the config.json and tokenizer files that the
engine and the gateways read for any model.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from engine.checkpoints.gguf.config import make_config
from engine.checkpoints.gguf.file import GGUFFiles, parts_of
from engine.checkpoints.gguf.tokenizer import eos_token_ids, make_tokenizer, tokenizer_config
from engine.contract.errors import ModelLoadError
from engine.contract.hub_files import resolve_source
from engine.system.cache_folder import cache_dir, cache_entry

SUFFIX = ".gguf"
_SOURCE = "source.json"
#: Version of the written files; files of another version are written again.
_FORM = 2


def find_gguf(path: Path) -> Path | None:
    """Return a path's GGUF file: itself, or the only model in a folder without config.json.

    For a split model this is the first file.
    """
    if path.is_file() and path.suffix == SUFFIX:
        return parts_of(path)[0]
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob(f"*{SUFFIX}"))
    if not files:
        return None
    parts = parts_of(files[0])
    if set(files) != set(parts):
        raise ModelLoadError(f"{path} holds {len(files)} GGUF files: name one of them.")
    return parts[0]


def gguf_folder(path: Path, *, with_tokenizer: bool = True) -> Path:
    """Return the folder for a GGUF file, creating it if necessary.

    Raises `ModelLoadError` for an invalid or unsupported file.
    """
    path = resolve_source(path)
    target = cache_dir() / "gguf" / _identity(path, with_tokenizer)
    if (target / _SOURCE).exists():
        return target
    files = GGUFFiles(path)
    header = files.header
    config = make_config(header, files.bytes_of)
    with cache_entry(target) as workplace:
        workplace.mkdir(parents=True)
        if with_tokenizer:
            make_tokenizer(header).save(str(workplace / "tokenizer.json"))
            _write(workplace / "tokenizer_config.json", tokenizer_config(header))
            _write(workplace / "generation_config.json", {"eos_token_id": eos_token_ids(header)})
        _write(workplace / "config.json", config)
        _write(workplace / _SOURCE, {"file": str(path)})
    return target


def source_of(folder: Path) -> Path | None:
    """Return the GGUF file from which `gguf_folder` created this folder; None for other folders."""
    path = folder / _SOURCE
    if folder.parent != cache_dir() / "gguf" or not path.exists():
        return None
    return Path(json.loads(path.read_text(encoding="utf-8"))["file"])


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _identity(path: Path, with_tokenizer: bool) -> str:
    """Return a value that changes with the path, and with the files' sizes and times."""
    parts = [str(path), str(with_tokenizer), str(_FORM)]
    for stat in (part.stat() for part in parts_of(path)):
        parts += [str(stat.st_size), str(stat.st_mtime_ns)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
