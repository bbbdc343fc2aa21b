"""The chat templates of `examples/` write prompts as models of their format read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.text.chat_template import render_chat_text
from engine.text.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Bye"},
]
PROMPTS = {
    "template_chatml": "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\nHello<|im_end|>\n"
    "<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    "<|im_start|>assistant\n",
    "template_alpaca": "Be brief.\n\n### Instruction:\nHello\n\n### Response:\nHi\n\n"
    "### Instruction:\nBye\n\n### Response:\n",
    "template_llava": "Be brief.\n\nUSER: Hello\nASSISTANT: Hi\nUSER: Bye\nASSISTANT:",
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ROOT / "demo" / "model")


@pytest.mark.parametrize("name", PROMPTS)
def test_a_template_writes_its_format(name: str, tokenizer: Tokenizer) -> None:
    template = (ROOT / "examples" / f"{name}.jinja").read_text()
    assert render_chat_text(tokenizer, CHAT, chat_template=template) == PROMPTS[name]


def test_each_template_is_tested() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.jinja")} == set(PROMPTS)
