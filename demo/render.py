"""Examples as text, through the chat template that ships with the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from demo.generator.example import Example

TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text()
END_OF_TEXT = "<|endoftext|>"


def chat(messages: list[dict[str, Any]], tools: list | None, prompt: bool = False) -> str:
    """A conversation in the model's markup. With prompt it ends where the answer begins."""
    rendered, _ = render_jinja_template(
        conversations=[messages],
        tools=tools or None,
        chat_template=TEMPLATE,
        add_generation_prompt=prompt,
    )
    return rendered[0]


def render(example: Example) -> str:
    """The whole example, answer included."""
    if example.plain:
        return "".join(example.plain) + END_OF_TEXT
    return chat(example.messages, example.tools)


def render_prompt(example: Example) -> str:
    """The example up to its answer."""
    if example.plain:
        return example.plain[0]
    return chat(example.prompt, example.tools, prompt=True)
