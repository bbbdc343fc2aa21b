"""Models from ModelScope through its own package, if `VLLM_USE_MODELSCOPE` is set. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from engine.contract.errors import ConfigError, ModelLoadError

VARIABLE = "VLLM_USE_MODELSCOPE"


def uses_modelscope() -> bool:
    """Whether hub ids are ModelScope's. Raises `ConfigError` for a value that isn't a boolean."""
    value = os.environ.get(VARIABLE, "").lower()
    if value not in ("", "0", "1", "false", "true"):
        raise ConfigError(f"{VARIABLE} must be 0 or 1; got {value!r}.", param=VARIABLE)
    return value in ("1", "true")


def download_from_modelscope(
    name: str,
    revision: str | None,
    cache_dir: str | None,
    patterns: Collection[str],
    *,
    param: str = "model",
) -> Path:
    """The folder of a model's files that match `patterns`, downloaded unless they are cached.

    Raises `ModelLoadError` with `param`, also without the package.
    """
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise ModelLoadError(
            f"{VARIABLE} is set, but the package isn't installed: pip install modelscope.",
            param=param,
        ) from error
    try:
        folder = snapshot_download(
            model_id=name, revision=revision, cache_dir=cache_dir, allow_patterns=[*patterns]
        )
    except Exception as error:  # the package raises many types
        raise ModelLoadError(
            f"{name} is no folder here and couldn't be downloaded from ModelScope: {error}",
            param=param,
        ) from error
    return Path(folder)
