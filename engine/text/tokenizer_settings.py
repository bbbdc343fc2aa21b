"""What the small files beside `tokenizer.json` say: special tokens and chat templates.

Nothing here imports code that a model folder brings: `auto_map` and `tokenizer_class` are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from engine.contract.errors import ModelLoadError
from engine.text.files import read_object, read_text, shortened

CONFIG_FILE = "tokenizer_config.json"
STANDARD_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@dataclass(slots=True)
class TokenizerSettings:
    """A model folder's tokenizer settings.

    Attributes:
        named_tokens: role (`bos_token`, `image_token`, ...) to the token's text.
        special_tokens: every special token, named or extra, with its flags.
        added_tokens: by id, tokens that `tokenizer_config.json` adds or redefines.
        chat_templates: name to Jinja source; "default" is the ordinary one.
        config: `tokenizer_config.json` as it is.
    """

    named_tokens: dict[str, str] = field(default_factory=dict)
    special_tokens: list[AddedToken] = field(default_factory=list)
    added_tokens: dict[int, AddedToken] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def read_settings(folder: Path) -> TokenizerSettings:
    """Settings of the tokenizer in `folder`. Raises `ModelLoadError` naming a broken file."""
    config_path = folder / CONFIG_FILE
    config = read_object(config_path)
    settings = TokenizerSettings(config=config)
    try:
        _read_added_tokens(settings, config)
        if not settings.added_tokens:
            # An old folder: the map beside the config says which tokens are special.
            config = config | read_object(folder / "special_tokens_map.json")
        _read_special_tokens(settings, config)
        settings.chat_templates = _read_templates(folder, config)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelLoadError(
            f"{config_path} has a malformed entry: {shortened(error)}.", param="model"
        ) from error
    return settings


def _token(value: Any, *, special: bool) -> AddedToken:
    """An `AddedToken` from a string or from its JSON form."""
    if isinstance(value, str):
        return AddedToken(value, special=special, normalized=False)
    flags = {name: bool(value[name]) for name in _FLAGS if name in value}
    return AddedToken(str(value["content"]), special=bool(value.get("special", special)), **flags)


def _read_added_tokens(settings: TokenizerSettings, config: dict[str, Any]) -> None:
    for index, value in (config.get("added_tokens_decoder") or {}).items():
        settings.added_tokens[int(index)] = _token(value, special=False)


def _read_special_tokens(settings: TokenizerSettings, config: dict[str, Any]) -> None:
    """Fill `named_tokens` and `special_tokens`, with the flags that `added_tokens` has."""
    named = {
        key: value
        for key, value in config.items()
        if value and (key in STANDARD_TOKENS or (key.endswith("_token") and isinstance(value, str)))
    }
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        named |= extra
        extra = []
    known = {token.content: token for token in settings.added_tokens.values()}
    for value in (*named.values(), *extra):
        token = _token(value, special=True)
        token = known.get(token.content, token)
        token.special = True
        if token not in settings.special_tokens:
            settings.special_tokens.append(token)
    settings.named_tokens = {
        key: _token(value, special=True).content for key, value in named.items()
    }


def _read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name; files win over `tokenizer_config.json`."""
    templates: dict[str, str] = {}
    legacy = read_object(folder / "chat_template.json").get("chat_template")
    for source in (config.get("chat_template"), legacy):
        if isinstance(source, str):
            templates["default"] = source
        elif isinstance(source, list):
            templates |= {str(entry["name"]): str(entry["template"]) for entry in source}
    path = folder / "chat_template.jinja"
    if path.exists():
        templates["default"] = read_text(path)
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = read_text(extra)
    return templates
