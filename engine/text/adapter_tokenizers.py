"""Tokenizers that adapters bring: a whole one, or tokens beside the model's."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import tokenizers

from engine.contract.adapters import (
    ADDED_TOKENS_FILE,
    TOKENIZER_FILE,
    AdapterRef,
    tokenizer_digest,
)
from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.text.files import read_object
from engine.text.tokenizer import Tokenizer, load_tokenizer

#: Tokenizers that are kept, each of which takes megabytes.
_KEPT = 32


class AdapterTokenizers:
    """The tokenizers of a model's adapters, by their content. Any thread may ask."""

    def __init__(self) -> None:
        #: By digest: an adapter's, and the model's in the place of which it is.
        self._known: OrderedDict[str, tuple[Tokenizer, Tokenizer]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, adapter: AdapterRef | None, base: Tokenizer) -> Tokenizer:
        """The adapter's own tokenizer, or the model's, `base`, where it brings none.

        Raises `InvalidRequest` for one that can't be read, or is of other content than was told.
        """
        if adapter is None or not adapter.tokenizer:
            return base
        with self._lock:
            found = self._known.get(adapter.tokenizer)
            if found is not None and found[1] is base:
                self._known.move_to_end(adapter.tokenizer)
                return found[0]
        made = _checked(adapter, base)
        with self._lock:
            self._known[adapter.tokenizer] = made, base
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return made


def _checked(adapter: AdapterRef, base: Tokenizer) -> Tokenizer:
    folder, told = Path(adapter.path), f"The adapter {adapter.name or adapter.digest[:12]!r}"
    try:
        made = read_adapter_tokenizer(folder, base)
        digest = tokenizer_digest(folder)
    except ModelLoadError as error:
        raise InvalidRequest(f"{told}: {error.message}", param="model") from error
    except OSError as error:
        raise InvalidRequest(f"{told} can't be read: {error.strerror}.", param="model") from error
    if digest != adapter.tokenizer:
        raise InvalidRequest(
            f"{told}: its tokenizer isn't there any more: the files hold {digest[:12] or 'none'}, "
            f"not {adapter.tokenizer[:12]}...",
            param="model",
        )
    return made


def read_adapter_tokenizer(folder: Path, base: Tokenizer) -> Tokenizer:
    """The tokenizer in an adapter's folder; chat templates are the model's where it has none.

    Raises `ModelLoadError` for one that can't be read.
    """
    if not (folder / TOKENIZER_FILE).is_file():
        return base.with_tokens(_added_tokens(folder))
    made = load_tokenizer(folder)
    if made.chat_template is None and base.chat_template is not None:
        made = made.with_chat_template(base.chat_template)
    return made


def _added_tokens(folder: Path) -> list[tuple[int, tokenizers.AddedToken]]:
    """Of `added_tokens.json`: ids and texts. Special ones stand in `special_tokens_map.json`."""
    path = folder / ADDED_TOKENS_FILE
    ids = read_object(path)
    if not all(type(token) is int and token >= 0 for token in ids.values()):
        raise ModelLoadError(f"{path} must hold ids by their tokens' texts.", param="model")
    special = set(_texts(read_object(folder / "special_tokens_map.json")))
    return [
        (token, tokenizers.AddedToken(text, special=text in special, normalized=False))
        for text, token in sorted(ids.items(), key=lambda entry: entry[1])
    ]


def _texts(names: Mapping[str, object]) -> list[str]:
    """The texts of a map of special tokens."""
    found: list[str] = []
    for value in names.values():
        for each in value if isinstance(value, list) else [value]:
            text = each.get("content") if isinstance(each, dict) else each
            found += [text] if isinstance(text, str) else []
    return found
