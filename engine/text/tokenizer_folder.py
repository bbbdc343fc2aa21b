"""Locates a model's tokenizer files, converting them to the form that gateways read if needed."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ModelLoadError
from engine.contract.hub_files import TOKENIZER_PATTERNS, is_hub_id
from engine.contract.modelscope import download_from_modelscope, uses_modelscope
from engine.system.cache_folder import cache_dir, cache_entry
from engine.text.tokenizer import Tokenizer, load_tokenizer
from engine.text.tokenizer_backend import TOKENIZER_FILE
from engine.text.vocabulary_files import write_tokenizer

# Only the engine converts: formats unknown to `engine.text.vocabulary_files` need `transformers`
# (and some of them the `sentencepiece` package).


def convert_tokenizer(
    path: str | Path, destination: str | Path, *, trust_remote_code: bool = False
) -> Tokenizer:
    """Convert the tokenizer of `path` to files in `destination` for `load_tokenizer`; load it.

    Args:
        path: a model folder without `tokenizer.json`.
        destination: a folder to write to; gateways load the tokenizer from it.
        trust_remote_code: run Python code in the folder (`auto_map`).

    Raises:
        ModelLoadError: there is no tokenizer that can be converted, or it requires the folder's
            code, which isn't trusted.
    """
    folder = Path(path)
    if write_tokenizer(folder, Path(destination)):
        return load_tokenizer(destination)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        slow = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # the library raises a dozen kinds, and custom code any kind
        raise ModelLoadError(f"{folder} has no tokenizer that can be converted: {error}") from error
    if not isinstance(slow, PreTrainedTokenizerFast):
        raise ModelLoadError(
            f"{folder} has a {type(slow).__name__}, which can't be written as {TOKENIZER_FILE}."
        )
    slow.save_pretrained(str(destination))
    return load_tokenizer(destination)


log = logging.getLogger(__name__)


def tokenizer_folder(config: EngineConfig, model_folder: Path) -> Path:
    """Return the folder with `tokenizer.json`.

    If `tokenizer` is a hub id, it is downloaded without weights. A folder that has only a slow
    tokenizer is converted once, into the cache. Raises `ModelLoadError` if nothing can be
    converted, or the download fails.
    """
    folder = _source_folder(config, model_folder)
    if config.skip_tokenizer_init or (folder / "tokenizer.json").exists():
        return folder

    destination = cache_dir() / "tokenizers" / _identity(folder)
    if not (destination / "tokenizer.json").exists():
        log.info("%s has no tokenizer.json; converting its tokenizer.", folder)
        try:
            with cache_entry(destination) as workplace:
                convert_tokenizer(folder, workplace, trust_remote_code=config.trust_remote_code)
        except OSError as error:
            raise ModelLoadError(
                f"{folder} has a tokenizer that can't be converted in {destination} "
                f"(QUIRE_CACHE_DIR): {error.strerror or error}."
            ) from error
    return destination


def _source_folder(config: EngineConfig, model_folder: Path) -> Path:
    """Return the folder of `tokenizer`, or of the model; hub ids are downloaded."""
    # Another revision of only the tokenizer, for a model on the hub.
    name = config.tokenizer or (config.model if config.tokenizer_revision else "")
    if not name:
        return model_folder
    folder = Path(name).expanduser()
    if folder.exists() or not is_hub_id(name):
        if config.tokenizer_revision:
            raise ModelLoadError(
                f"tokenizer_revision={config.tokenizer_revision!r} needs a tokenizer on the hub; "
                f"{name} is a path. Leave it out.",
                param="tokenizer_revision",
            )
        return folder
    patterns = [*TOKENIZER_PATTERNS, *(["*.py"] * config.trust_remote_code)]
    if uses_modelscope():
        return download_from_modelscope(
            name, config.tokenizer_revision, config.download_dir, patterns, param="tokenizer"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(
            snapshot_download(
                name,
                revision=config.tokenizer_revision,
                cache_dir=config.download_dir,
                allow_patterns=patterns,
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(
            f"The tokenizer {name} is no folder and couldn't be downloaded: {error}",
            param="tokenizer",
        ) from error


def _identity(folder: Path) -> str:
    """Return a value that changes with the folder's path, and its files' sizes and times."""
    parts = [str(folder.resolve())]
    for path in sorted(folder.glob("*")):
        if path.is_file() and path.suffix != ".safetensors":
            stat = path.stat()
            parts.append(f"{path.name}:{stat.st_size}:{stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
