"""Tokenizer settings in files besides `tokenizer.json`: special tokens and chat templates.

No code in a model folder is imported: `auto_map` and `tokenizer_class` are ignored.
"""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from engine.contract.checkpoint_options import SAMPLING_DEFAULTS
from engine.contract.errors import InvalidRequest, ModelLoadError
from engine.contract.sampling_params import SamplingParams

#: Maximum size of a model's text file; the largest tokenizers have some 40 million bytes.
_MAX_BYTES = 1 << 28
#: Maximum number of characters of foreign text in a message.
_MAX_MESSAGE_CHARS = 500


def truncate_for_message(value: object) -> str:
    """Return `value` as text for a message: truncated, without lone surrogates."""
    text = str(value).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:_MAX_MESSAGE_CHARS]}..."


def read_text(path: Path) -> str:
    """Read a UTF-8 file. Raises `ModelLoadError` naming the file."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelLoadError(f"{path} is no file.")
        if status.st_size > _MAX_BYTES:
            raise ModelLoadError(
                f"{path} has {status.st_size} bytes, at most {_MAX_BYTES} are read."
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} can't be read: {truncate_for_message(error)}.") from error


def parse_object(text: str, path: Path) -> dict[str, Any]:
    """Parse a JSON object from a file's text. Raises `ModelLoadError` naming the file."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} isn't valid JSON: {truncate_for_message(error)}.") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object.")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in an optional file; {} if the file is missing."""
    return parse_object(read_text(path), path) if path.exists() else {}


log = logging.getLogger(__name__)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Read generation_config.json; {} if missing. Raises `ModelLoadError` if it is invalid."""
    path = folder / "generation_config.json"
    if not path.exists():
        return {}
    return parse_object(read_text(path), path)


def eos_ids(generation: dict[str, Any], further: Iterable[int | None], vocab: int) -> list[int]:
    """Return every id that ends an output, once: the generation config's first, then the others.

    `further` comes from config.json and the tokenizer: a chat fine-tune's config.json often still
    names its base model's EOS, and only the tokenizer knows the token that ends a turn.
    """
    configured = generation.get("eos_token_id")
    named = configured if isinstance(configured, list) else [configured]
    ids = (token for token in [*named, *further] if type(token) is int and 0 <= token < vocab)
    return list(dict.fromkeys(ids))


def sampling_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """Return defaults for requests' sampling fields; values out of range are left out."""
    defaults: dict[str, Any] = {}
    for name in SAMPLING_DEFAULTS:
        value = generation.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except InvalidRequest as error:
            log.warning("generation_config.json: %s It isn't used.", error.message)
            continue
        defaults[name] = value
    return defaults


CONFIG_FILE = "tokenizer_config.json"
PROCESSOR_FILE = "processor_config.json"
#: By `processor_class` of preprocessor_config.json, of processors that come with checkpoints: the
#: token that stands for a picture, which no file names.
_IMAGE_TOKENS = {"MiniCPMVProcessor": "<image>", "Phi3VProcessor": "<|image|>"}
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
#: By `processor_class`, of models that embed a text or a picture: how each is written, which they
#: were trained with, and no template of theirs says.
_TEMPLATES = {
    "ColQwen2Processor": (
        "{% macro query(text) %}Query: {{ text }}{{ pad_token * 10 }}\n{% endmacro %}"
        "{% for message in messages %}{% if message['content'] is string %}"
        "{{ query(message['content']) }}{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}<|im_start|>user\n<|vision_start|><|image_pad|>"
        "<|vision_end|>Describe the image.<|im_end|><|endoftext|>"
        "{% else %}{{ query(part['text']) }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
}


@dataclass(slots=True)
class TokenizerSettings:
    """A model folder's tokenizer settings.

    Attributes:
        named_tokens: role (`bos_token`, `image_token`, ...) to the token's text.
        special_tokens: every special token, named or not, with its flags.
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
    """Read the tokenizer settings in `folder`. Raises `ModelLoadError` naming an invalid file."""
    config_path = folder / CONFIG_FILE
    config = read_object(config_path)
    settings = TokenizerSettings(config=config)
    try:
        for index, value in (config.get("added_tokens_decoder") or {}).items():
            settings.added_tokens[int(index)] = _token(value, special=False)
        if not settings.added_tokens:
            # In old folders special_tokens_map.json says which tokens are special.
            config = config | read_object(folder / "special_tokens_map.json")
        _read_special_tokens(settings, config)
        files = [folder / name for name in ("preprocessor_config.json", PROCESSOR_FILE)]
        facts = {name: value for path in files for name, value in read_object(path).items()}
        processor = str(facts.get("processor_class"))
        image_token = facts.get("image_token", _IMAGE_TOKENS.get(processor))
        if isinstance(image_token, str):
            settings.named_tokens.setdefault("image_token", image_token)
        settings.chat_templates = _read_templates(folder, config)
        if processor in _TEMPLATES:
            settings.chat_templates["default"] = _TEMPLATES[processor]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelLoadError(
            f"{config_path} has a malformed entry: {truncate_for_message(error)}."
        ) from error
    return settings


def _token(value: Any, *, special: bool) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=special, normalized=False)
    flags = {name: bool(value[name]) for name in _FLAGS if name in value}
    return AddedToken(str(value["content"]), special=bool(value.get("special", special)), **flags)


def _read_special_tokens(settings: TokenizerSettings, config: dict[str, Any]) -> None:
    """Fill `named_tokens` and `special_tokens`, with the flags in `added_tokens`."""
    named = {
        key: value
        for key, value in config.items()
        if value and (key in STANDARD_TOKENS or (key.endswith("_token") and isinstance(value, str)))
    }
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        named |= extra
        extra = []
    by_content = {token.content: token for token in settings.added_tokens.values()}
    for value in (*named.values(), *extra):
        token = _token(value, special=True)
        token = by_content.get(token.content, token)
        token.special = True
        if token not in settings.special_tokens:
            settings.special_tokens.append(token)
    settings.named_tokens = {
        key: _token(value, special=True).content for key, value in named.items()
    }


def _read_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return chat templates by name; files take precedence over `tokenizer_config.json`."""
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
