"""Reading a model folder's JSON and template files, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError


def read_text(path: Path) -> str:
    """A UTF-8 file's text. Raises `ModelLoadError` naming the file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing.", param="model") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} can't be read: {error}.", param="model") from error


def parse_object(text: str, path: Path) -> dict[str, Any]:
    """A JSON object from a file's text. Raises `ModelLoadError` naming the file."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is no valid JSON: {error}.", param="model") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object.", param="model")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in an optional file; {} where there is no such file."""
    return parse_object(read_text(path), path) if path.is_file() else {}
