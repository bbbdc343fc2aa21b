"""Text in and out: tokenizers, chat templates, streamed text, stop strings. Torch-free."""

from engine.text.chat_template import render_chat, render_chat_text
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.stop import StopChecker
from engine.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "IncrementalDetokenizer",
    "StopChecker",
    "Tokenizer",
    "load_tokenizer",
    "render_chat",
    "render_chat_text",
]
