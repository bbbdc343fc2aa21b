"""Text input and output: tokenizers, chat templates, detokenization, stop strings. Torch-free."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.text.chat_template import render_chat, render_chat_text
    from engine.text.detokenizer import IncrementalDetokenizer
    from engine.text.stop_strings import StopChecker
    from engine.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "IncrementalDetokenizer",
    "StopChecker",
    "Tokenizer",
    "load_tokenizer",
    "render_chat",
    "render_chat_text",
]
#: Modules of the names, imported lazily: all commands read model files, but few need templates.
_LATER = {
    "engine.text.chat_template": ("render_chat", "render_chat_text"),
    "engine.text.detokenizer": ("IncrementalDetokenizer",),
    "engine.text.stop_strings": ("StopChecker",),
    "engine.text.tokenizer": ("Tokenizer", "load_tokenizer"),
}


def __getattr__(name: str) -> Any:
    """Import a name on first access."""
    for module, names in _LATER.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'engine.text' has no attribute {name!r}")
