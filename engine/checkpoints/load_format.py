"""Sources of a model's weights, by load format."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoints.ctranslate2 import CTranslate2Weights, source_folder
from engine.checkpoints.gguf.folder import source_of
from engine.checkpoints.gguf.weights import GGUFWeights
from engine.checkpoints.quantized_weights import QuantizedWeights
from engine.checkpoints.safetensors import DummyWeights, WeightReader
from engine.checkpoints.torch_files import TensorWeights, open_hub_folder, read_npcache, read_pt
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.quantization.formats.base import CheckpointFormat

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
MAX_BYTES = 5 * 1024**3


def checked_pattern(pattern: str | None) -> str:
    """Return the pattern of file names. Raises `InvalidRequest` for an invalid one."""
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
    """Read the files of rank 0. Raises `ModelLoadError` if there are none."""
    files = sorted(folder.glob(checked_pattern(pattern).format(rank=0, part="*")))
    if not files:
        raise ModelLoadError(
            f"{folder} holds no {(pattern or PATTERN).format(rank=0, part='*')}: make them with "
            "save_sharded_state."
        )
    return WeightReader(folder, files)


def save_sharded_state(
    tensors: Mapping[str, Tensor],
    path: str | Path,
    pattern: str | None = None,
    max_size: int | str | None = MAX_BYTES,
) -> list[Path]:
    """Write tensors to files of at most `max_size` bytes (or one tensor), and return the files.

    Raises `InvalidRequest` for an invalid folder or size.
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
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() in addresses:  # tied: in safetensors a tensor has one name
            tensor = tensor.clone()
        addresses.add(tensor.data_ptr())
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


_KEY_BYTES = 32


#: Remote locations of tensorizer files.
REMOTE_SCHEMES = ("s3://", "http://", "https://")


def _open_remote(library: Any, uri: str, mode: str) -> Any:
    """Open a stream of a remote file, with the credentials from vLLM's variables."""
    endpoint = os.environ.get("S3_ENDPOINT_URL")
    return library.stream_io.open_stream(
        uri,
        mode,
        force_http=endpoint.startswith("http://") if endpoint else None,
        s3_access_key_id=os.environ.get("S3_ACCESS_KEY_ID"),
        s3_secret_access_key=os.environ.get("S3_SECRET_ACCESS_KEY"),
        s3_endpoint=endpoint,
    )


def read_tensorizer(
    uri: str, folder: Path, keyfile: str | None = None, num_readers: int | None = None
) -> TensorWeights:
    """Read a file of CoreWeave's tensorizer, which must be installed.

    Args:
        uri: a path, absolute or in the folder, or a URL of `REMOTE_SCHEMES`. Tensors' hashes are
        verified, so that a truncated file is refused.
        keyfile: the file with the encryption key. num_readers: the number of reading threads.

    Raises `ModelLoadError` if the package is missing, and for an invalid file.
    """
    library = _tensorizer()
    is_remote = uri.startswith(REMOTE_SCHEMES)
    if not is_remote and not (folder / uri).is_file():
        raise ModelLoadError(f"There is no {folder / uri}.", param="model_loader_extra_config")
    key = None
    if keyfile is not None:
        key = library.DecryptionParams.from_key(_key(keyfile))
    try:
        with ExitStack() as stack:
            file = str(folder / uri)
            if is_remote:
                file = stack.enter_context(_open_remote(library, uri, "rb"))
            source = stack.enter_context(
                library.TensorDeserializer(
                    file, device="cpu", verify_hash=True, encryption=key, num_readers=num_readers
                )
            )
            tensors = {str(name): source[name] for name in source.keys()}  # noqa: SIM118
    except Exception as error:  # the library raises many types for invalid files
        name = uri if is_remote else folder / uri
        raise ModelLoadError(f"{name} isn't a sound tensorizer file: {error}") from error
    return TensorWeights(folder, tensors)


def write_tensorizer(
    tensors: Mapping[str, Tensor], uri: str, keyfile: str | None, *, new_key: bool
) -> None:
    """Write a tensorizer file, or an object in a bucket. With a `keyfile` it is encrypted, with the
    key in that file, or with a new one that is written to it.

    Raises `ModelLoadError` if the package is missing, the key is invalid or the bucket can't be
    written, and `OSError`.
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
    is_remote = uri.startswith(REMOTE_SCHEMES)
    if not is_remote:
        Path(uri).touch()  # raises OSError, where the library has errors of its own
    try:
        target = _open_remote(library, uri, "wb") if is_remote else uri
        serializer = library.TensorSerializer(target, encryption=key)
        try:
            serializer.write_state_dict(dict(tensors))
        finally:
            serializer.close()
    except Exception as error:  # the clients of buckets raise many types
        if not is_remote:
            raise
        raise ModelLoadError(f"{uri} can't be written: {error}", param="tensorizer_uri") from error


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


def open_weights(
    folder: Path,
    config: EngineConfig,
    device: torch.device,
    form: CheckpointFormat | None = None,
) -> DummyWeights | GGUFWeights | CTranslate2Weights | WeightReader:
    """Open a model folder's weights; dummy weights are created on `device`.

    `form` is their quantization format, or None.

    Raises `ModelLoadError` for files that are invalid.
    """
    if config.load_format == "dummy":
        return DummyWeights(device=str(device))
    file, ctranslate2 = source_of(folder), source_folder(folder)
    if config.load_format != "auto" and (file or ctranslate2):
        what = f"{file} is a GGUF file" if file else f"{ctranslate2} is in CTranslate2's layout"
        raise ModelLoadError(
            f"{what}: leave load_format={config.load_format} out.", param="load_format"
        )
    if ctranslate2 is not None:
        return CTranslate2Weights(ctranslate2)
    return open_layers(folder, config, form) if file is None else GGUFWeights(file)


def open_layers(folder: Path, config: EngineConfig, form: CheckpointFormat | None) -> WeightReader:
    """Open the weights of a folder in any format.

    Raises `ModelLoadError` for files that are invalid.
    """
    weights = open_checkpoint(folder, config)
    return weights if form is None else QuantizedWeights(weights, form)


def open_checkpoint(folder: Path, config: EngineConfig) -> WeightReader:
    """Open the weights of a folder in the format that `load_format` names.

    Raises `ModelLoadError` for files that are invalid.
    """
    extra = config.model_loader_extra_config or {}
    if config.load_format == "pt":
        return read_pt(folder)
    if config.load_format == "npcache":
        return read_npcache(folder)
    if config.load_format == "sharded_state":
        return read_sharded_state(folder, extra.get("pattern"))
    if config.load_format == "tensorizer":
        uri = extra.get("tensorizer_uri", "model.tensors")
        key, readers = extra.get("encryption_keyfile"), extra.get("num_readers")
        return read_tensorizer(uri, folder, key, readers)
    return WeightReader(folder) if config.load_format == "safetensors" else open_hub_folder(folder)
