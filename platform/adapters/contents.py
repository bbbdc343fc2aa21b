"""What an adapter's files are, whatever they're called: looked at before anything is kept.

Whether they fit a model, and whether their weights are numbers, is for `engine.lora.check`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adapters.errors import AdapterInvalid, AdapterTooLarge
from adapters.store import GGUF_FILE
from engine.contract.adapters import (
    CONFIG_FILE,
    MAX_BESIDE_BYTES,
    MAX_TOKENIZER_BYTES,
    NEW_TOKENS_FILE,
    TOKENIZER_FILE,
    TOKENIZER_FILES,
    WEIGHTS_FILE,
)
from engine.contract.checks import shown

MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 1 << 16
#: Bytes of a safetensors header: as many as the check reads.
_HEADER_LIMIT = 1 << 26


def check_contents(staged: Path) -> None:
    """Look at files under the names that they have in the store.

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
    """Of a tokenizer's file, which no process reads before its check has."""
    most = MAX_TOKENIZER_BYTES if path.name == TOKENIZER_FILE else MAX_BESIDE_BYTES
    if path.is_file() and path.stat().st_size > most:
        raise AdapterTooLarge(f"{path.name} has more than {most >> 20} MiB.", param="files")


def _check_safetensors(path: Path) -> None:
    """A pickle under another name is still one, and a header may lie about what follows."""
    from safetensors import SafetensorError, safe_open

    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(9)
    header = int.from_bytes(start[:8], "little")
    plausible = len(start) == 9 and header <= min(size - 8, _HEADER_LIMIT) and start[8:] == b"{"
    if not plausible:
        pickled = start[:2] == b"PK" or start[:1] == b"\x80"
        told = "a pickle under another name" if pickled else "no safetensors file"
        raise AdapterInvalid(f"{path.name} is {told}.", param="files")
    try:
        with safe_open(str(path), framework="np"):
            pass
    except SafetensorError as error:
        told = shown(str(error))
        raise AdapterInvalid(
            f"{path.name} isn't a valid safetensors file: {told}.", param="files"
        ) from error


def _config(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise AdapterInvalid(f"{CONFIG_FILE} has more than 1 MiB.", param="files")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise AdapterInvalid(
            f"{CONFIG_FILE} isn't valid JSON: {shown(str(error))}.", param="files"
        ) from error
    if not isinstance(found, dict):
        raise AdapterInvalid(f"{CONFIG_FILE} must hold a JSON object.", param="files")
    return found


def _check_config(config: dict[str, Any]) -> None:
    kind, rank = config.get("peft_type"), config.get("r", 8)
    if kind != "LORA":
        raise AdapterInvalid(
            f"{CONFIG_FILE}: peft_type must be LORA, got {shown(kind)}.", param="peft_type"
        )
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise AdapterInvalid(
            f"{CONFIG_FILE}: r must be a whole number from 1 to {MAX_RANK}, got {shown(rank)}.",
            param="r",
        )
