"""The files that an adapter may consist of, and staging them from a folder or an archive."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Collection
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO, Any

from tqdm.utils import CallbackIOWrapper

from adapters.store import GGUF_FILE
from common.errors import AdapterInvalid, AdapterTooLarge
from common.object_storage import OnBytes
from engine.contract.lora import (
    ADAPTER_FILES,
    CONFIG_FILE,
    MAX_BESIDE_BYTES,
    MAX_TOKENIZER_BYTES,
    NEW_TOKENS,
    NEW_TOKENS_FILE,
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    TORCH_WEIGHTS_FILE,
    WEIGHTS_FILE,
    has_tokenizer,
)
from engine.contract.validation import format_value
from engine.system.torch_conversion import ConversionError, convert_torch_files

# Files are checked before any is stored. `engine.lora.check` checks that they fit the model and
# that their weights are finite.

MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 1 << 16
#: Maximum bytes of a safetensors header that the check reads.
_HEADER_LIMIT = 1 << 26


def check_contents(staged: Path) -> None:
    """Check an adapter's staged files, which have the names used by the store.

    Raises `AdapterInvalid`, whose `param` is the setting of adapter_config.json, or "files".
    """
    gguf = staged / GGUF_FILE
    if gguf.is_file():
        with gguf.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise AdapterInvalid("The .gguf file isn't a valid GGUF file.", param="files")
        return
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (staged / name).is_file():
            raise AdapterInvalid(f"The adapter has no file {name}.", param="files")
    for name in TOKENIZER_FILES:
        _check_size(staged / name)
    _check_safetensors(staged / WEIGHTS_FILE)
    if (staged / NEW_TOKENS_FILE).is_file():
        _check_safetensors(staged / NEW_TOKENS_FILE)
    _check_config(_config(staged / CONFIG_FILE))


def _check_size(path: Path) -> None:
    """Check the size of a tokenizer file before any process reads it."""
    max_bytes = MAX_TOKENIZER_BYTES if path.name == TOKENIZER_FILE else MAX_BESIDE_BYTES
    if path.is_file() and path.stat().st_size > max_bytes:
        raise AdapterTooLarge(f"{path.name} has more than {max_bytes >> 20} MiB.", param="files")


def _check_safetensors(path: Path) -> None:
    """Check a safetensors file's header: the file may be a pickle, or the header may be wrong."""
    from safetensors import SafetensorError, safe_open

    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(9)
    header = int.from_bytes(start[:8], "little")
    plausible = len(start) == 9 and header <= min(size - 8, _HEADER_LIMIT) and start[8:] == b"{"
    if not plausible:
        pickled = start[:2] == b"PK" or start[:1] == b"\x80"
        problem = "a pickle under another name" if pickled else "no safetensors file"
        raise AdapterInvalid(f"{path.name} is {problem}.", param="files")
    try:
        with safe_open(str(path), framework="np"):
            pass
    except SafetensorError as error:
        problem = format_value(str(error))
        raise AdapterInvalid(
            f"{path.name} isn't a valid safetensors file: {problem}.", param="files"
        ) from error


def _config(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise AdapterInvalid(f"{CONFIG_FILE} has more than 1 MiB.", param="files")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise AdapterInvalid(
            f"{CONFIG_FILE} isn't valid JSON: {format_value(str(error))}.", param="files"
        ) from error
    if not isinstance(config, dict):
        raise AdapterInvalid(f"{CONFIG_FILE} must hold a JSON object.", param="files")
    return config


def _check_config(config: dict[str, Any]) -> None:
    kind, rank = config.get("peft_type"), config.get("r", 8)
    if kind != "LORA":
        raise AdapterInvalid(
            f"{CONFIG_FILE}: peft_type must be LORA, got {format_value(kind)}.", param="peft_type"
        )
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise AdapterInvalid(
            f"{CONFIG_FILE}: r must be a whole number from 1 to {MAX_RANK}, "
            f"got {format_value(rank)}.",
            param="r",
        )


#: Suffixes of formats that execute code when they are loaded.
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
ZIP = ".zip"
GGUF = ".gguf"
#: Maximum bytes of a file name. File systems allow 255, a path of the API 200 characters.
MAX_NAME_BYTES = 200
#: Maximum members of an archive; a larger one is an attempt to fill a disk with names.
MAX_MEMBERS = 1000
CHUNK = 1 << 20
#: Values of `OSError.errno` that a damaged archive raises rather than the disk: bz2 sets none, and
#: an offset before the start of the file is an invalid argument.
ARCHIVE_ERRORS = (None, errno.EINVAL)


def check_names(names: Collection[str]) -> None:
    """Raise `AdapterInvalid` unless these are the files of one adapter, or one archive of them."""
    for name in names:
        check_name(name)
    if {CONFIG_FILE, WEIGHTS_FILE} <= set(names) <= set(ADAPTER_FILES):
        return
    single_files = [name for name in names if suffix_of(name) in (ZIP, GGUF)]
    if len(names) == 1 and single_files:
        return
    missing = sorted({CONFIG_FILE, WEIGHTS_FILE} - set(names))
    if missing and not single_files:
        raise AdapterInvalid(f"The adapter has no file {missing[0]}.", param="files")
    raise AdapterInvalid(
        f"An adapter is {CONFIG_FILE} with {WEIGHTS_FILE}, perhaps with {NEW_TOKENS_FILE} and a "
        "tokenizer's files, or one .gguf file, or one .zip of them.",
        param="files",
    )


def check_name(name: str) -> None:
    """Raise `AdapterInvalid` for a file that doesn't belong to an adapter."""
    suffix = suffix_of(name)
    if suffix in PICKLES:
        raise AdapterInvalid(
            f"{name[:100]} is a pickle: reading it would run code. Save the adapter as safetensors "
            "(PEFT's `save_pretrained` does).",
            param="files",
        )
    is_plain_name = name == PurePosixPath(name).name and "\\" not in name and name.isprintable()
    if not is_plain_name or (name not in ADAPTER_FILES and suffix not in (ZIP, GGUF)):
        raise AdapterInvalid(
            f"{name[:100]!r} isn't a file of an adapter. Its files are "
            f"{', '.join(ADAPTER_FILES)}, a .gguf file or a .zip of them.",
            param="files",
        )
    if len(name.encode()) > MAX_NAME_BYTES:
        raise AdapterInvalid(
            f"File name is longer than {MAX_NAME_BYTES} bytes: {name[:100]!r}...",
            param="files",
        )


def suffix_of(name: str) -> str:
    """Return a name's suffix in lower case: some systems write `TONE.ZIP`."""
    return Path(name).suffix.lower()


def check_companion_file(name: str) -> None:
    """Raise `AdapterInvalid` for a file that can neither be ignored nor read: a pickle, or new
    tokens in another format.
    """
    if suffix_of(name) in PICKLES:
        check_name(name)
    if name.startswith(NEW_TOKENS) and name != NEW_TOKENS_FILE:
        raise AdapterInvalid(
            f"{name[:100]} can't be read: of new tokens only {NEW_TOKENS_FILE} is.", param="files"
        )


def adapter_files(names: Collection[str]) -> list[str]:
    """Return the adapter's files among a folder's file names. PEFT's two files are always included,
    and tokenizer files only if they form a complete tokenizer.

    Raises `AdapterInvalid` like `check_companion_file`.
    """
    for name in sorted(name for name in names if name.startswith(NEW_TOKENS)):
        check_companion_file(name)
    unused = () if has_tokenizer(names) else TOKENIZER_FILES
    present = [name for name in ADAPTER_FILES if name in names and name not in unused]
    return list(dict.fromkeys((CONFIG_FILE, WEIGHTS_FILE, *present)))


def stage_folder(source: Path, staged: Path, limit: int, on_bytes: OnBytes | None = None) -> None:
    """Copy an adapter from a folder or a GGUF file; links are refused.

    `on_bytes`: called with the sizes of chunks as they are copied.

    Raises: `AdapterInvalid`, `AdapterTooLarge`, OSError.
    """
    files = {GGUF_FILE: source} if source.is_file() else _files_of(source)
    remaining = limit
    for name, file in files.items():
        with _open_regular_file(file) as content, (staged / name).open("xb") as copy:
            counted = CallbackIOWrapper(on_bytes, content) if on_bytes else content
            remaining = copy_bounded(counted, copy, remaining, limit)
    if (staged / TORCH_WEIGHTS_FILE).is_file():
        _convert_weights(staged)
    check_contents(staged)


def _convert_weights(staged: Path) -> None:
    """Convert an operator's `adapter_model.bin` to safetensors. Raises `AdapterInvalid`."""
    converted = staged / "converted"
    try:
        convert_torch_files([staged / TORCH_WEIGHTS_FILE], converted)
    except ConversionError as error:
        reason = str(error).replace(f"{staged}/", "")
        raise AdapterInvalid(reason, param="path") from error
    files = sorted(converted.iterdir())
    if len(files) != 1:
        raise AdapterInvalid(
            f"{TORCH_WEIGHTS_FILE} must hold tensors, of at most 1 GiB.", param="path"
        )
    files[0].rename(staged / WEIGHTS_FILE)
    (staged / TORCH_WEIGHTS_FILE).unlink()
    converted.rmdir()


def stage_zip(archive: Path, staged: Path, limit: int) -> None:
    """Extract the known files of an archive and ignore all others.

    Raises: `AdapterInvalid` for pickles, links, paths outside the archive, several adapters in one
    archive; `AdapterTooLarge` if the content exceeds `limit` bytes.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = opened.infolist()
            if len(members) > MAX_MEMBERS:
                raise AdapterInvalid(
                    f"The archive has {len(members)} members; at most {MAX_MEMBERS} are read.",
                    param="files",
                )
            adapter_members: dict[str, zipfile.ZipInfo] = {}
            tokenizer_members: dict[PurePosixPath, zipfile.ZipInfo] = {}
            for member in members:
                _classify_member(member, adapter_members, tokenizer_members)
            adapter_members |= _tokenizer_of(adapter_members, tokenizer_members)
            remaining = limit
            for name, member in adapter_members.items():
                with opened.open(member) as content, (staged / name).open("xb") as copy:
                    remaining = copy_bounded(content, copy, remaining, limit)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, RuntimeError) as error:
        raise AdapterInvalid(f"The archive can't be read: {error}.", param="files") from error
    except (EOFError, struct.error, UnicodeDecodeError, zlib.error, LZMAError) as error:
        raise AdapterInvalid("The archive is damaged.", param="files") from error
    except OSError as error:
        if error.errno not in ARCHIVE_ERRORS:
            raise
        raise AdapterInvalid("The archive is damaged.", param="files") from error
    check_contents(staged)


def copy_bounded(source: IO[bytes], target: IO[bytes], remaining: int, limit: int) -> int:
    """Copy at most `remaining` bytes; return how many remain. Raises `AdapterTooLarge`."""
    while chunk := source.read(CHUNK):
        remaining -= len(chunk)
        if remaining < 0:
            raise AdapterTooLarge(
                f"The adapter has more than {limit} bytes, the most that one may have.",
                param="files",
            )
        target.write(chunk)
    return remaining


def _files_of(folder: Path) -> dict[str, Path]:
    """Return the adapter's files in a folder: name in the store -> path."""
    names = {entry.name for entry in os.scandir(folder)}
    required = adapter_files(names)
    if WEIGHTS_FILE in names:
        return {name: folder / name for name in required}
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if len(ggufs) == 1:
        return {GGUF_FILE: folder / ggufs[0]}
    if TORCH_WEIGHTS_FILE in names:
        required[required.index(WEIGHTS_FILE)] = TORCH_WEIGHTS_FILE
        return {name: folder / name for name in required}
    for name in sorted(names):
        check_companion_file(name)
    raise AdapterInvalid(f"The adapter has no file {WEIGHTS_FILE}.", param="path")


def _blob_of(path: Path) -> Path:
    """Return what a file of the hub's cache links to in `blobs`; any other path unchanged."""
    repository = path.parent.parent.parent
    if path.parent.parent.name == "snapshots" and path.is_symlink():
        target = path.resolve()
        if target.parent == repository.resolve() / "blobs":
            return target
    return path


def _open_regular_file(path: Path) -> IO[bytes]:
    """Open a regular file; other links and devices are refused. Raises `AdapterInvalid`."""
    try:
        handle = os.open(_blob_of(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise AdapterInvalid(f"The adapter has no file {path.name}.", param="path") from None
    except OSError as error:
        raise AdapterInvalid(
            f"{path.name} can't be read: {error.strerror}.", param="path"
        ) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise AdapterInvalid(f"{path.name} isn't a regular file.", param="path")
    return os.fdopen(handle, "rb")


def _classify_member(
    member: zipfile.ZipInfo,
    members: dict[str, zipfile.ZipInfo],
    tokenizer_members: dict[PurePosixPath, zipfile.ZipInfo],
) -> None:
    """Add a member to `members` or `tokenizer_members` if it belongs to an adapter. Raises
    `AdapterInvalid` for a dangerous one.
    """
    path = PurePosixPath(member.filename)
    if "\\" in member.filename or path.is_absolute() or ".." in path.parts:
        raise AdapterInvalid(
            f"{member.filename[:100]!r} points outside the archive.", param="files"
        )
    if stat.S_ISLNK(member.external_attr >> 16):
        raise AdapterInvalid(f"{member.filename[:100]!r} is a link.", param="files")
    if member.is_dir():
        return
    check_companion_file(path.name)
    name = GGUF_FILE if path.suffix == ".gguf" else path.name
    if name in TOKENIZER_FILES:
        tokenizer_members[path] = member
        return
    if name not in (*ADAPTER_FILES, GGUF_FILE):
        return  # ignore other files, such as a readme
    if name in members:
        raise AdapterInvalid("The archive holds more than one adapter.", param="files")
    members[name] = member


def _tokenizer_of(
    members: dict[str, zipfile.ZipInfo], tokenizer_members: dict[PurePosixPath, zipfile.ZipInfo]
) -> dict[str, zipfile.ZipInfo]:
    """Return the members of a tokenizer in the same folder as the weights, if it's complete."""
    if WEIGHTS_FILE not in members:
        return {}
    folder = PurePosixPath(members[WEIGHTS_FILE].filename).parent
    by_name = {
        path.name: member for path, member in tokenizer_members.items() if path.parent == folder
    }
    return by_name if has_tokenizer(by_name) else {}


def remove_staging(staged: Path) -> None:
    """Remove a staged folder if it still exists."""
    shutil.rmtree(staged, ignore_errors=True)
