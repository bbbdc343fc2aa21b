"""One tokenizer of each kind, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.engine.text import folders

KINDS: dict[str, tuple[Callable[[], object], dict[str, str]]] = {
    "byte_level": (folders.byte_level, folders.CHATML_CONFIG),
    "byte_level_prefix": (
        lambda: folders.byte_level(prefix_space=True),
        folders.CHATML_CONFIG,
    ),
    "llama3": (folders.llama3, folders.CHATML_CONFIG),
    "sentencepiece_first": (folders.sentencepiece_bpe, folders.SENTENCEPIECE_CONFIG),
    "sentencepiece_legacy": (
        lambda: folders.sentencepiece_bpe(scheme="legacy"),
        folders.SENTENCEPIECE_CONFIG,
    ),
    "sentencepiece_never": (
        lambda: folders.sentencepiece_bpe(scheme="never", strip=False),
        folders.SENTENCEPIECE_CONFIG,
    ),
    "unigram": (folders.metaspace_unigram, folders.SENTENCEPIECE_CONFIG),
    "word_piece": (folders.wordpiece, {"unk_token": "[UNK]", "eos_token": "[SEP]"}),
}
BYTE_KINDS = [kind for kind in KINDS if kind != "word_piece"]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a kind of tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")

    def get(kind: str) -> Path:
        folder = root / kind
        if not folder.exists():
            make, config = KINDS[kind]
            folders.save(folder, make(), config)  # type: ignore[arg-type]
        return folder

    return get


@pytest.fixture(scope="session")
def tokenizer_of(folder_of: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    """A loaded tokenizer of a kind."""
    loaded: dict[str, Tokenizer] = {}

    def get(kind: str) -> Tokenizer:
        if kind not in loaded:
            loaded[kind] = load_tokenizer(str(folder_of(kind)))
        return loaded[kind]

    return get


#: Chat templates in the manner of the field's common ones, each with its kind of tokenizer.
CHAT_KINDS = {
    "chatml": "byte_level",
    "qwen": "byte_level",
    "parts": "byte_level",
    "llama3": "llama3",
    "mistral": "sentencepiece_first",
}


@pytest.fixture(scope="session")
def chat_folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tokenizer with one of the chat templates."""
    root = tmp_path_factory.mktemp("chat")

    def get(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            make, config = KINDS[CHAT_KINDS[name]]
            template = folders.chat_template(name)
            folders.save(folder, make(), config, template)  # type: ignore[arg-type]
        return folder

    return get


@pytest.fixture(scope="session")
def chat_tokenizer_of(chat_folder_of: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    """A loaded tokenizer with one of the chat templates."""
    loaded: dict[str, Tokenizer] = {}

    def get(name: str) -> Tokenizer:
        if name not in loaded:
            loaded[name] = load_tokenizer(str(chat_folder_of(name)))
        return loaded[name]

    return get
