"""What gateways and replicas say to each other about LoRA adapters. Torch-free.

An adapter is its content: the sha256 over its configuration, its weights and the tokenizer that it
brings. Its name is a pointer that a tenant may turn to other content at any time, so nothing is
cached, billed or resumed by it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

import msgspec

from engine.contract.errors import InvalidRequest

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
#: Where vLLM looks for rows that go behind those of a model's tables; only safetensors are read.
NEW_TOKENS = "new_embeddings."
NEW_TOKENS_FILE = f"{NEW_TOKENS}safetensors"
#: What an adapter may bring of a tokenizer, whose texts are its requests' then.
TOKENIZER_FILE, ADDED_TOKENS_FILE = "tokenizer.json", "added_tokens.json"
TOKENIZER_FILES = (
    *(TOKENIZER_FILE, ADDED_TOKENS_FILE, "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json"),
)
#: Bytes of a `tokenizer.json`, and of each of the files beside it, that a server takes.
MAX_TOKENIZER_BYTES, MAX_BESIDE_BYTES = 1 << 26, 1 << 23
#: All that an adapter may consist of, where it is no GGUF file.
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, NEW_TOKENS_FILE, *TOKENIZER_FILES)
#: Where an adapter's weights lie, nearest to the kernels first.
TIERS = ("device", "host", "disk")
_PIECE = 1 << 20


class AdapterRef(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The adapter that a request goes through.

    Attributes:
        digest: sha256 of the content, 64 hex digits, see `adapter_digest`.
        name: what the client called it; for messages, logs and the ledger alone.
        path: its folder (or GGUF file), shared by volume as models are. A replica that doesn't hold
            the digest loads it from there and refuses a folder with another digest.
        owner: the tenant it belongs to; "" for one that all share. For quotas of adapter memory.
        tokenizer: sha256 of the tokenizer in that folder, see `tokenizer_digest`, by which its
            prompts and texts are; "": by the model's.
        vocab_size: tokens that its requests may hold, where its check has found that it brings
            some; 0: the model's, or unknown. A replica goes by the adapter's own tables.
    """

    digest: str
    name: str = ""
    path: str = ""
    owner: str = ""
    tokenizer: str = ""
    vocab_size: int = 0


class AdapterState(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An adapter on one replica, as its heartbeat tells.

    Attributes:
        digest, name: as in `AdapterRef`; the name under which it was last asked for.
        rank: the largest of its modules.
        tier: one of `TIERS`.
        num_bytes: of its weights in that tier.
        pinned: never driven out.
        num_running: requests that go through it now.
        num_waiting: requests that wait for it.
        load_seconds: how long the last load took.
    """

    digest: str
    name: str = ""
    rank: int = 0
    tier: str = "disk"
    num_bytes: int = 0
    pinned: bool = False
    num_running: int = 0
    num_waiting: int = 0
    load_seconds: float = 0.0


def digest_of(adapter: AdapterRef | None) -> str:
    """The digest of a request's adapter, "" without one."""
    return adapter.digest if adapter else ""


def name_of(adapter: AdapterRef | None) -> str:
    """What a client called its request's adapter, "" without one."""
    return adapter.name if adapter else ""


def adapter_files(path: Path) -> list[Path]:
    """What makes an adapter up: PEFT's two files, there or not, vLLM's one of new tokens if it is
    there, and what it brings of a tokenizer; or one GGUF file.
    """
    if path.is_file():
        return [path]
    new = path / NEW_TOKENS_FILE
    own = [path / CONFIG_FILE, path / WEIGHTS_FILE, *([new] if new.is_file() else [])]
    return [*own, *tokenizer_files(path)]


def tokenizer_files(path: Path) -> list[Path]:
    """What an adapter brings of a tokenizer: nothing without the first or the second of them."""
    found = [name for name in TOKENIZER_FILES if (path / name).is_file()]
    return [path / name for name in found] if brings_tokenizer(found) else []


def brings_tokenizer(names: Collection[str]) -> bool:
    """Whether files of these names are a tokenizer, alone or beside the model's."""
    return TOKENIZER_FILE in names or ADDED_TOKENS_FILE in names


def adapter_digest(path: Path) -> str:
    """Sha256 of an adapter's content, 64 hex digits; see `adapter_files`.

    Each file goes in with its name and its size, so no two contents run together.
    Raises InvalidRequest (param `path`) for a folder without the two files, OSError from reading.
    """
    return _digest([(file, "" if path.is_file() else file.name) for file in adapter_files(path)])


def tokenizer_digest(path: Path) -> str:
    """The same of an adapter's tokenizer, "" where it brings none. Raises OSError from reading."""
    files = tokenizer_files(path)
    return _digest([(file, file.name) for file in files]) if files else ""


def _digest(files: list[tuple[Path, str]]) -> str:
    digest = hashlib.sha256()
    for file, name in files:
        if not file.is_file():
            raise InvalidRequest(f"The adapter has no file {file.name}.", param="path")
        digest.update(f"{name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            while piece := content.read(_PIECE):
                digest.update(piece)
    return digest.hexdigest()
