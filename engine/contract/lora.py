"""LoRA adapters between gateways and replicas. Torch-free.

An adapter is identified by its content: the sha256 over its configuration, weights and tokenizer.
Its name is a pointer that a tenant may move to other content at any time, so nothing is cached,
billed or resumed by name.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.contract.errors import InvalidRequest
from engine.contract.validation import format_value

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
#: PEFT's former weight files; read if there are no safetensors.
TORCH_WEIGHTS_FILE = "adapter_model.bin"
#: vLLM's file of additional rows for a model's tables; only safetensors are read.
NEW_TOKENS = "new_embeddings."
NEW_TOKENS_FILE = f"{NEW_TOKENS}safetensors"
#: Tokenizer files of an adapter, which then apply to the texts of its requests.
TOKENIZER_FILE, ADDED_TOKENS_FILE = "tokenizer.json", "added_tokens.json"
TOKENIZER_FILES = (
    *(TOKENIZER_FILE, ADDED_TOKENS_FILE, "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json"),
)
#: Maximum bytes of a `tokenizer.json`, and of each other file, that a server accepts.
MAX_TOKENIZER_BYTES, MAX_BESIDE_BYTES = 1 << 26, 1 << 23
#: All files that an adapter may have, unless it is a GGUF file.
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, NEW_TOKENS_FILE, *TOKENIZER_FILES)
#: Tiers of an adapter's weights, the nearest to the kernels first.
TIERS = ("device", "host", "disk")
_CHUNK_BYTES = 1 << 20


class AdapterRef(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The adapter of a request.

    Attributes:
        digest: sha256 of the content, 64 hex digits, see `adapter_digest`.
        name: the client's name for it; only for messages, logs and the ledger.
        path: its folder (or GGUF file), shared by volume like models. A replica that doesn't have
            the digest loads it from there and refuses a folder with another digest.
        owner: the tenant that owns it; "" for a shared one. For quotas of adapter memory.
        tokenizer: sha256 of the tokenizer in that folder, see `tokenizer_digest`, which applies to
            its prompts and texts; "": the model's.
        vocab_size: number of tokens that its requests may use, if its check has found additional
            ones; 0: the model's, or unknown. A replica uses the adapter's own tables.
        num_bytes: size of its files, if a replica may have to fetch them; 0: they are at `path`.
    """

    digest: str
    name: str = ""
    path: str = ""
    owner: str = ""
    tokenizer: str = ""
    vocab_size: int = 0
    num_bytes: int = 0


class AdapterStatus(msgspec.Struct, omit_defaults=True, kw_only=True):
    """State of an adapter on one replica, as its heartbeat reports it.

    Attributes:
        digest, name: as in `AdapterRef`; the name under which it was last requested.
        rank: the largest of its modules.
        tier: one of `TIERS`.
        num_bytes: of its weights in that tier.
        pinned: never evicted.
        num_running: requests that currently use it.
        num_waiting: requests that wait for it.
        load_seconds: duration of the last load.
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


def adapter_name_of(adapter: AdapterRef | None) -> str:
    """Return the client's name of its request's adapter, "" without one."""
    return adapter.name if adapter else ""


def snapshot_of(path: Path) -> Path:
    """Return the files' folder if `path` is a repository in the hub's cache, else `path`."""
    main = path / "refs" / "main"
    try:
        revision = main.read_text().strip() if main.is_file() else ""
    except (OSError, UnicodeDecodeError):
        return path
    snapshot = path / "snapshots" / revision
    return snapshot if revision.isalnum() and snapshot.is_dir() else path


def adapter_files(path: Path) -> list[Path]:
    """Return an adapter's files: PEFT's two, existing or not, and vLLM's file of new tokens and
    the tokenizer's files, if they exist; or one GGUF file.
    """
    if path.is_file():
        return [path]
    new = path / NEW_TOKENS_FILE
    peft_files = [path / CONFIG_FILE, weights_file(path), *([new] if new.is_file() else [])]
    return [*peft_files, *tokenizer_files(path)]


def weights_file(folder: Path) -> Path:
    """Return the file of an adapter's weights, existing or not."""
    safetensors, torch_file = folder / WEIGHTS_FILE, folder / TORCH_WEIGHTS_FILE
    only_torch = torch_file.is_file() and not safetensors.is_file()
    return torch_file if only_torch else safetensors


def tokenizer_files(path: Path) -> list[Path]:
    """Return an adapter's tokenizer files; none without one of the first two."""
    names = [name for name in TOKENIZER_FILES if (path / name).is_file()]
    return [path / name for name in names] if has_tokenizer(names) else []


def has_tokenizer(names: Collection[str]) -> bool:
    """Whether files of these names are a tokenizer, alone or together with the model's."""
    return TOKENIZER_FILE in names or ADDED_TOKENS_FILE in names


def adapter_digest(path: Path) -> str:
    """Return the sha256 of an adapter's content, 64 hex digits; see `adapter_files`.

    Each file is hashed with its name and size, so that no two contents hash the same bytes.
    Raises InvalidRequest (param `path`) for a folder without the two files, OSError from reading.
    """
    return _digest([(file, "" if path.is_file() else file.name) for file in adapter_files(path)])


def tokenizer_digest(path: Path) -> str:
    """Return the sha256 of an adapter's tokenizer, "" without one. Raises OSError from reading."""
    files = tokenizer_files(path)
    return _digest([(file, file.name) for file in files]) if files else ""


def _digest(files: list[tuple[Path, str]]) -> str:
    digest = hashlib.sha256()
    for file, name in files:
        if not file.is_file():
            raise InvalidRequest(f"The adapter has no file {file.name}.", param="path")
        digest.update(f"{name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            while chunk := content.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


#: Per file: name, inode, size, mtime and ctime in nanoseconds.
FileFingerprints = tuple[tuple[str, int, int, int, int], ...]

#: Maximum number of cached adapters.
_MAX_ENTRIES = 4096
#: The resolution of file system clocks is limited, and a second write within it is invisible: files
#: written more recently than this are hashed again.
_TICK_S = 0.1


def file_fingerprints(path: Path) -> FileFingerprints:
    """Return a value that changes with every write to the adapter's files. Raises OSError."""
    stats = [(file.name, file.stat()) for file in adapter_files(path)]
    return tuple(
        (name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        for name, stat in stats
    )


class DigestCache:
    """Digests of adapters and their tokenizers by path, valid while the files don't change.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[Path, tuple[FileFingerprints, str, str]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, path: Path) -> tuple[str, str]:
        """Return the digests of the current content. Raises as `adapter_digest`."""
        states = file_fingerprints(path)
        digests = self.get_cached(path, states)
        if digests is None:
            digests = adapter_digest(path), tokenizer_digest(path)
            self.store(path, states, *digests)
        return digests

    def get_cached(self, path: Path, states: FileFingerprints) -> tuple[str, str] | None:
        with self._lock:
            entry = self._entries.get(path)
            if entry is None or entry[0] != states:
                return None
            self._entries.move_to_end(path)
            return entry[1:]

    def store(self, path: Path, states: FileFingerprints, digest: str, tokenizer: str) -> None:
        """Cache digests of files whose fingerprints are the same before and after hashing."""
        written = max((max(state[3:]) for state in states), default=0)
        if file_fingerprints(path) != states or time.time_ns() - written < _TICK_S * 1e9:
            return
        with self._lock:
            self._entries[path] = states, digest, tokenizer
            self._entries.move_to_end(path)
            while len(self._entries) > _MAX_ENTRIES:
                self._entries.popitem(last=False)


#: The process's cache.
digest_cache = DigestCache()


@dataclass(frozen=True)
class LoRARequest:
    """An adapter of an offline request, by its folder.

    It is identified by the content of its files: equal content is shared whatever its name, and
    changed files are another adapter.

    Attributes:
        lora_name: for messages and metrics.
        lora_int_id: a number chosen by the caller, at least 1; otherwise unused.
        lora_path: the folder with adapter_config.json and adapter_model.safetensors, or that of its
            repository in the hub's cache, or a file of GGUF. A tokenizer in it is that of the
            adapter's prompts and texts.
        load_inplace: no effect: changed files are always reloaded.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str | Path) or not str(value):
                raise InvalidRequest(
                    f"{name} must be a text, got {format_value(value)}.", param=name
                )
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InvalidRequest(
                f"lora_int_id must be a whole number of at least 1, got {format_value(number)}.",
                param="lora_int_id",
            )

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path

    def ref(self) -> AdapterRef:
        """Return the adapter that the folder currently holds.

        Raises `InvalidRequest` (param `lora_request`) if it holds none.
        """
        path = snapshot_of(Path(self.lora_path).expanduser().absolute())
        try:
            digest, tokenizer = digest_cache.of(path)
        except OSError as error:
            raise InvalidRequest(
                f"The adapter {self.lora_name!r} can't be read from {path}: {error.strerror}.",
                param="lora_request",
            ) from error
        return AdapterRef(digest=digest, name=self.lora_name, path=str(path), tokenizer=tokenizer)


def spread_lora_requests(lora_request: Any, count: int) -> list[LoRARequest | None]:
    """Return the requests of `count` prompts from one `LoRARequest` for all, a list, or None.

    Raises `InvalidRequest` for anything else.
    """
    several = isinstance(lora_request, Sequence) and not isinstance(lora_request, str)
    requests = list(lora_request) if several else [lora_request] * count
    if len(requests) != count:
        raise InvalidRequest(
            f"{count} prompts need as many lora_request, got {len(requests)}.", param="lora_request"
        )
    for one in requests:
        if not isinstance(one, LoRARequest | None):
            raise InvalidRequest(
                f"lora_request must be a LoRARequest, got {format_value(one)}.",
                param="lora_request",
            )
    return requests


def to_adapter_refs(lora_request: Any, count: int) -> list[AdapterRef | None]:
    """Return the adapters of `count` prompts; `lora_request` and errors as `spread_lora_requests`.

    Raises `InvalidRequest` also as `LoRARequest.ref`.
    """
    requests = spread_lora_requests(lora_request, count)
    return [None if request is None else request.ref() for request in requests]
