"""Reading a model folder's JSON and template files, with errors that name the file."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from engine.contract.errors import ModelLoadError

#: A text file of a model; the largest tokenizers have some 40 million.
_MOST_BYTES = 1 << 28
#: Characters of somebody else's text that a message shows.
_MOST_SHOWN = 500


def shortened(value: object) -> str:
    """`value` as text for a message, whatever it holds: cut, without lone surrogates."""
    text = str(value).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def read_text(path: Path) -> str:
    """A UTF-8 file's text. Raises `ModelLoadError` naming the file."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelLoadError(f"{path} is no file.", param="model")
        if status.st_size > _MOST_BYTES:
            raise ModelLoadError(
                f"{path} has {status.st_size} bytes, at most {_MOST_BYTES} are read.", param="model"
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing.", param="model") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} can't be read: {shortened(error)}.", param="model") from error


def parse_object(text: str, path: Path) -> dict[str, Any]:
    """A JSON object from a file's text. Raises `ModelLoadError` naming the file."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(
            f"{path} isn't valid JSON: {shortened(error)}.", param="model"
        ) from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object.", param="model")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in an optional file; {} where there is no such file."""
    return parse_object(read_text(path), path) if path.exists() else {}
