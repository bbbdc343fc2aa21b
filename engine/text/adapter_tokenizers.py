"""Tokenizers of adapters: complete ones, or tokens added to the model's."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.contract.lora import (
    ADDED_TOKENS_FILE,
    MAX_BESIDE_BYTES,
    MAX_TOKENIZER_BYTES,
    TOKENIZER_FILE,
    AdapterRef,
    tokenizer_digest,
    tokenizer_files,
)
from engine.text.tokenizer import Tokenizer, load_tokenizer
from engine.text.tokenizer_backend import load_backend
from engine.text.tokenizer_files import read_object

# Libraries serialize a loaded tokenizer in different ways: with settings that a component ignores,
# with a single step as a sequence, with "" for nothing.


#: Settings without effect, by part and type: offsets concern post-processors, and a byte decoder
#: splits no text.
_IDLE = {
    ("pre_tokenizer", "ByteLevel"): ("trim_offsets",),
    ("decoder", "ByteLevel"): ("add_prefix_space", "trim_offsets", "use_regex"),
}
#: Settings of a BPE model for which these values mean the same as none.
_EMPTY = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "dropout": 0.0}


def canonical_form(part: str, written: Any) -> Any:
    """Return the same value for all serializations of a normalizer, pre_tokenizer, model or decoder
    with the same effect; `part`: which of these it is.
    """
    steps = list(_steps(part, written))
    if len(steps) < 2:
        return steps[0] if steps else None
    return {"type": "Sequence", "steps": steps}


def _steps(part: str, written: Any) -> Iterator[Any]:
    """Yield the steps of a part, with nested sequences flattened."""
    if not isinstance(written, Mapping):
        yield from () if written is None else (written,)
    elif written.get("type") == "Sequence":
        for inner in next((value for value in written.values() if isinstance(value, list)), []):
            yield from _steps(part, inner)
    else:
        idle = _IDLE.get((part, written.get("type", "")), ())
        used = {name: value for name, value in written.items() if name not in idle}
        if used.get("type") == "BPE":
            used |= {name: None for name, nothing in _EMPTY.items() if used.get(name) == nothing}
        yield used


#: Maximum number of cached tokenizers, each of which takes megabytes.
_MAX_CACHED = 32
#: Maximum number of tokens that an adapter may add on a server.
MAX_ADDED_TOKENS = 1 << 16
#: File that names the special tokens.
_SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json")
#: Parts that determine tokenization, besides the added tokens.
_PARTS = ("normalizer", "pre_tokenizer", "model", "decoder")


class AdapterTokenizers:
    """The tokenizers of a model's adapters by their content. Thread-safe."""

    def __init__(self) -> None:
        #: By digest: the adapter's tokenizer, and the model's that it replaces.
        self._cached: OrderedDict[str, tuple[Tokenizer, Tokenizer]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, adapter: AdapterRef | None, base: Tokenizer) -> Tokenizer:
        """Return the adapter's tokenizer, or the model's, `base`, if it has none.

        Raises `InvalidRequest` for one that can't be read, or whose content has another digest.
        """
        if (tokenizer := self.get_cached(adapter, base)) is not None or adapter is None:
            return tokenizer or base
        tokenizer = _checked(adapter, base)
        with self._lock:
            self._cached[adapter.tokenizer] = tokenizer, base
            while len(self._cached) > _MAX_CACHED:
                self._cached.popitem(last=False)
        return tokenizer

    def get_cached(self, adapter: AdapterRef | None, base: Tokenizer) -> Tokenizer | None:
        """Return the adapter's tokenizer if no file must be read for it; otherwise None."""
        if adapter is None or not adapter.tokenizer:
            return base
        with self._lock:
            entry = self._cached.get(adapter.tokenizer)
            if entry is None or entry[1] is not base:
                return None
            self._cached.move_to_end(adapter.tokenizer)
            return entry[0]


def check_adapter_tokenizer(folder: Path, base: Tokenizer) -> str:
    """Check a tokenizer that servers are to use for tenants. Return its digest; "" if it equals the
    model's, which is then used.

    It must tokenize text as the model's does, except for added tokens. So a grammar for the model's
    tokens stays valid, and no pattern from the adapter can take excessive time.

    Raises `ModelLoadError`, which names the file, for one that can't be read or differs otherwise.
    """
    for file in tokenizer_files(folder):
        max_bytes = MAX_TOKENIZER_BYTES if file.name == TOKENIZER_FILE else MAX_BESIDE_BYTES
        if (size := file.stat().st_size) > max_bytes:
            raise ModelLoadError(
                f"{file.name} has {size} bytes; at most {max_bytes} are read.", param=file.name
            )
    adapter_tokenizer = _by_file_name(folder, base)
    adapter_parts, model_parts = (
        json.loads(tokenizer.to_json()) for tokenizer in (adapter_tokenizer, base)
    )
    for part in _PARTS:
        if canonical_form(part, adapter_parts[part]) != canonical_form(part, model_parts[part]):
            raise ModelLoadError(
                f"{TOKENIZER_FILE} isn't the model's with tokens added: its {part} is another. "
                "Without the file the model's tokenizer is used.",
                param=TOKENIZER_FILE,
            )
    if (added := len(adapter_tokenizer.added_tokens) - len(base.added_tokens)) > MAX_ADDED_TOKENS:
        raise ModelLoadError(
            f"The tokenizer adds {added} tokens; at most {MAX_ADDED_TOKENS} may be added.",
            param=TOKENIZER_FILE if (folder / TOKENIZER_FILE).is_file() else ADDED_TOKENS_FILE,
        )
    return (
        ""
        if _describe(adapter_tokenizer, adapter_parts) == _describe(base, model_parts)
        else tokenizer_digest(folder)
    )


def _by_file_name(folder: Path, base: Tokenizer) -> Tokenizer:
    """Read the adapter's tokenizer. Errors have file names without the server's path."""
    try:
        return read_adapter_tokenizer(folder, base)
    except ModelLoadError as error:
        message = error.message.replace(f"{folder}/", "")
        present = [file.name for file in tokenizer_files(folder)]
        named = [name for name in present if name in message] or present
        raise ModelLoadError(message, param=named[0]) from error


def _describe(tokenizer: Tokenizer, parts: Mapping[str, object]) -> tuple[object, ...]:
    """Return everything that affects prompts and texts."""
    settings = tokenizer.settings
    return (
        parts["added_tokens"],
        parts["post_processor"],
        settings.chat_templates,
        settings.named_tokens,
    )


def _checked(adapter: AdapterRef, base: Tokenizer) -> Tokenizer:
    folder, subject = Path(adapter.path), f"The adapter {adapter.name or adapter.digest[:12]!r}"
    try:
        tokenizer = read_adapter_tokenizer(folder, base)
        digest = tokenizer_digest(folder)
    except ModelLoadError as error:
        raise InvalidRequest(f"{subject}: {error.message}", param="model") from error
    except OSError as error:
        raise InvalidRequest(
            f"{subject} can't be read: {error.strerror}.", param="model"
        ) from error
    if digest != adapter.tokenizer:
        raise InvalidRequest(
            f"{subject}: its tokenizer isn't there any more: the files hold "
            f"{digest[:12] or 'none'}, not {adapter.tokenizer[:12]}...",
            param="model",
        )
    return tokenizer


def read_adapter_tokenizer(folder: Path, base: Tokenizer) -> Tokenizer:
    """Read the tokenizer in an adapter's folder; settings and chat templates that the folder lacks
    are the model's.

    Raises `ModelLoadError` for one that can't be read.
    """
    if not (folder / TOKENIZER_FILE).is_file():
        return base.with_tokens(_added_tokens(folder))
    tokenizer = load_tokenizer(folder)
    if not any((folder / name).is_file() for name in _SETTINGS_FILES):
        templates = tokenizer.settings.chat_templates or base.settings.chat_templates
        settings = replace(base.settings, chat_templates=templates)
        tokenizer = Tokenizer(load_backend(folder, settings), settings)
    if tokenizer.chat_template is None and base.chat_template is not None:
        tokenizer = tokenizer.with_chat_template(base.chat_template)
    return tokenizer


def _added_tokens(folder: Path) -> list[tuple[int, tokenizers.AddedToken]]:
    """Read `added_tokens.json`: ids and texts. `special_tokens_map.json` names special ones."""
    path = folder / ADDED_TOKENS_FILE
    ids = read_object(path)
    if not all(type(token) is int and token >= 0 for token in ids.values()):
        raise ModelLoadError(f"{path} must hold ids by their tokens' texts.")
    special = set(_texts(read_object(folder / "special_tokens_map.json")))
    return [
        (token, tokenizers.AddedToken(text, special=text in special, normalized=False))
        for text, token in sorted(ids.items(), key=lambda entry: entry[1])
    ]


def _texts(names: Mapping[str, object]) -> list[str]:
    texts: list[str] = []
    for value in names.values():
        for item in value if isinstance(value, list) else [value]:
            text = item.get("content") if isinstance(item, dict) else item
            texts += [text] if isinstance(text, str) else []
    return texts
