"""Files of CoreWeave's tensorizer: read and written, encrypted where there's a key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.contract.errors import ModelLoadError
from engine.models.formats import TensorWeights

_KEY_BYTES = 32


def read_tensorizer(
    path: Path, folder: Path, keyfile: str | None = None, num_readers: int | None = None
) -> TensorWeights:
    """A file of CoreWeave's tensorizer, which must be installed.

    Args:
        keyfile: the file with the key that it was encrypted by. num_readers: threads that read.

    Raises `ModelLoadError` without that package, and for a file that isn't sound.
    """
    library = _tensorizer()
    if not path.is_file():
        raise ModelLoadError(f"There is no {path}.", param="model_loader_extra_config")
    key = None
    if keyfile is not None:
        key = library.DecryptionParams.from_key(_key(keyfile))
    try:
        with library.TensorDeserializer(
            str(path), device="cpu", verify_hash=True, encryption=key, num_readers=num_readers
        ) as source:
            tensors = {str(name): source[name] for name in source.keys()}  # noqa: SIM118
    except Exception as error:  # of a bad file the library raises many kinds
        raise ModelLoadError(
            f"{path} isn't a sound tensorizer file: {error}", param="model"
        ) from error
    return TensorWeights(folder, tensors)


def write_tensorizer(
    tensors: Mapping[str, Tensor], path: Path, keyfile: str | None, *, new_key: bool
) -> None:
    """Write such a file; encrypted where a `keyfile` is named, by a new key that goes there or by
    the one that it holds.

    Raises `ModelLoadError` without that package or for a key that is none, and `OSError`.
    """
    library, key = _tensorizer(), None
    if keyfile is not None:
        if new_key:
            key = library.EncryptionParams.random()
            descriptor = os.open(keyfile, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(key.key)
        else:
            key = library.EncryptionParams(_key(keyfile))
    path.touch()  # says what the library would only say as an error of its own
    serializer = library.TensorSerializer(str(path), encryption=key)
    try:
        serializer.write_state_dict(dict(tensors))
    finally:
        serializer.close()


def _tensorizer() -> Any:
    try:
        import tensorizer
    except ImportError as error:
        raise ModelLoadError(
            "load_format=tensorizer needs the package: pip install 'quire[tensorizer]'.",
            param="load_format",
        ) from error
    return tensorizer


def _key(keyfile: str) -> bytes:
    """The 32 bytes of a key's file."""
    try:
        key = Path(keyfile).read_bytes()
    except OSError as error:
        raise ModelLoadError(
            f"{keyfile} can't be read: {error.strerror}.", param="model_loader_extra_config"
        ) from error
    if len(key) != _KEY_BYTES:
        raise ModelLoadError(
            f"{keyfile} is no key: {len(key)} bytes, not {_KEY_BYTES}.",
            param="model_loader_extra_config",
        )
    return key
