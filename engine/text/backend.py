"""The `tokenizers` library's object behind `Tokenizer`: checked, special tokens declared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import ModelLoadError
from engine.text.files import parse_object, read_text
from engine.text.tokenizer_settings import TokenizerSettings

TOKENIZER_FILE = "tokenizer.json"
#: Files of tokenizers that `engine.text.convert` can turn into a `tokenizer.json`.
CONVERTIBLE_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)


def load_backend(folder: Path, settings: TokenizerSettings) -> tokenizers.Tokenizer:
    """The tokenizer in `folder`, never truncating or padding.

    Raises:
        ModelLoadError: no folder, no `tokenizer.json`, or one that isn't a tokenizer.
    """
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is no folder.", param="model")
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        found = [name for name in CONVERTIBLE_FILES if (folder / name).is_file()]
        hint = f" {found[0]} is there: it must be converted first." if found else ""
        raise ModelLoadError(f"{path} is missing.{hint}", param="model")
    text = read_text(path)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        parse_object(text, path)
        raise ModelLoadError(f"{path} is no tokenizer: {error}.", param="model") from error
    return declare_tokens(backend, settings)


def declare_tokens(
    backend: tokenizers.Tokenizer, settings: TokenizerSettings
) -> tokenizers.Tokenizer:
    """Declare the settings' added and special tokens and switch truncation and padding off."""
    present = set(map(repr, backend.get_added_tokens_decoder().values()))
    new = [
        token for _, token in sorted(settings.added_tokens.items()) if repr(token) not in present
    ]
    if new:
        backend.add_tokens(new)
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    special = [known.get(token.content, token) for token in settings.special_tokens]
    special = [token for token in special if token.content not in known or not token.special]
    if special:
        backend.add_special_tokens(special)
    backend.no_truncation()
    backend.no_padding()
    return backend


def plain_copy(
    backend: tokenizers.Tokenizer, text_tokens: frozenset[str], *, inside: bool
) -> tokenizers.Tokenizer:
    """A copy for text in which control tokens are ordinary characters.

    Args:
        text_tokens: added tokens to read as characters besides the special ones.
        inside: for text that doesn't start the prompt: no prefix space is put before it where the
            original puts one only before the very first word.
    """
    data: dict[str, Any] = json.loads(backend.to_str())
    data["post_processor"] = None
    for token in data["added_tokens"]:
        if token["content"] in text_tokens:
            token["special"] = True
    if inside:
        _drop_first_prefix(data.get("pre_tokenizer"))
    copy = tokenizers.Tokenizer.from_str(json.dumps(data))
    copy.encode_special_tokens = True
    return copy


def _drop_first_prefix(pre_tokenizer: dict[str, Any] | None) -> None:
    """Turn a Metaspace that prefixes the first word only into one that prefixes none."""
    if pre_tokenizer is None:
        return
    for part in pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        if part.get("type") == "Metaspace" and part.get("prepend_scheme") == "first":
            part["prepend_scheme"] = "never"
