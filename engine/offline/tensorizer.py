"""Models in files of CoreWeave's tensorizer, with vLLM's names.

The package is only imported to write or read a file; see `engine.checkpoints.load_format`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine.checkpoints.load_format import REMOTE_SCHEMES, open_checkpoint, write_tensorizer
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import InvalidRequest
from engine.model_loader.loader import resolve_folder
from engine.offline.engine_args import EngineArgs


@dataclass
class TensorizerArgs:
    """A file, and how to read it.

    Attributes:
        tensorizer_uri: the file's path or URL (s3://, http://, https://).
        num_readers: number of reading threads.
        encryption_keyfile: a file with the 32 bytes of the key, if the file is encrypted.
        verify_hash: has no effect, as tensors are always verified.
        s3_access_key_id, s3_secret_access_key, s3_endpoint: must be empty. Access to a bucket is
            set by the environment variables S3_ACCESS_KEY_ID, S3_SECRET_ACCESS_KEY and
            S3_ENDPOINT_URL.
    """

    tensorizer_uri: str | None = None
    verify_hash: bool = False
    num_readers: int | None = None
    encryption_keyfile: str | None = None
    s3_access_key_id: str | None = None
    s3_secret_access_key: str | None = None
    s3_endpoint: str | None = None

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each field, and return the parser."""
        group = parser.add_argument_group("tensorizer options")
        for spec in fields(TensorizerArgs):
            kind: dict[str, Any] = {"type": int} if spec.name == "num_readers" else {}
            kind = {"action": "store_true"} if spec.name == "verify_hash" else kind
            group.add_argument("--" + spec.name.replace("_", "-"), **kind)
        return parser


@dataclass
class TensorizerConfig(TensorizerArgs):
    """`TensorizerArgs` as `model_loader_extra_config`. vLLM's other settings aren't supported."""

    def settings(self) -> dict[str, Any]:
        """Return the settings as a JSON object, with absolute paths.

        Raises `InvalidRequest` for other URLs, and for a bucket's keys, which must not be in
        settings that are displayed.
        """
        uri = self.tensorizer_uri or ""
        is_remote = uri.startswith(REMOTE_SCHEMES)
        if "://" in uri and not is_remote:
            raise InvalidRequest(
                f"tensorizer_uri must be a file or begin with {', '.join(REMOTE_SCHEMES)}; got "
                f"{uri!r}.",
                param="tensorizer_uri",
            )
        for name in ("s3_access_key_id", "s3_secret_access_key", "s3_endpoint"):
            if getattr(self, name):
                raise InvalidRequest(
                    f"{name} must be empty: set S3_ACCESS_KEY_ID, S3_SECRET_ACCESS_KEY and "
                    "S3_ENDPOINT_URL in the environment.",
                    param=name,
                )
        settings = {"num_readers": self.num_readers, "encryption_keyfile": self.encryption_keyfile}
        if is_remote:
            settings["tensorizer_uri"] = uri
        elif uri:
            settings["tensorizer_uri"] = str(Path(uri).absolute())
        if self.encryption_keyfile:
            settings["encryption_keyfile"] = str(Path(self.encryption_keyfile).absolute())
        return {name: value for name, value in settings.items() if value is not None}

    def _construct_tensorizer_args(self) -> TensorizerArgs:
        """Return `TensorizerArgs`. vLLM's example calls this."""
        return TensorizerArgs(**{spec.name: getattr(self, spec.name) for spec in fields(self)})


def tensorize_vllm_model(
    engine_args: EngineArgs, tensorizer_config: TensorizerConfig, generate_keyfile: bool = True
) -> Path | str:
    """Save a checkpoint's weights unchanged to the file `tensorizer_uri`. Returns the file.

    With an `encryption_keyfile` they are encrypted, with a new key that is saved to that file, or
    without `generate_keyfile` with the existing key.

    Raises:
        InvalidRequest: the file can't be written.
        ModelLoadError: the checkpoint can't be read, the package is missing, the key is invalid, or
            the bucket can't be written.
    """
    settings = tensorizer_config.settings()
    if "tensorizer_uri" not in settings:
        raise InvalidRequest(
            "tensorizer_uri is missing: the file to write.", param="tensorizer_uri"
        )
    config: EngineConfig = engine_args.create_engine_config()
    uri, keyfile = settings["tensorizer_uri"], settings.get("encryption_keyfile")
    if uri.startswith(("http://", "https://")):
        raise InvalidRequest(
            f"tensorizer_uri must be a file or s3:// to be written; got {uri!r}.",
            param="tensorizer_uri",
        )
    tensors = open_checkpoint(resolve_folder(config), config).tensors()
    try:
        if not uri.startswith(REMOTE_SCHEMES):
            Path(uri).parent.mkdir(parents=True, exist_ok=True)
        write_tensorizer(tensors, uri, keyfile, new_key=generate_keyfile)
    except OSError as error:
        raise InvalidRequest(
            f"{error.filename or uri} can't be used: {error.strerror}.", param="tensorizer_uri"
        ) from error
    return uri if uri.startswith(REMOTE_SCHEMES) else Path(uri)
