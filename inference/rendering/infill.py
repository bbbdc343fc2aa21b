"""Filling in the middle: what stands before and behind a gap as one prompt, in a model's own form.

Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (arXiv 2207.14255):
prefix, suffix, and then the middle, which the model writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.contract.errors import InvalidRequest
from engine.contract.protocol import ModelInfo
from engine.text import Tokenizer
from inference.errors import UnsupportedField
from inference.rendering.pool import render_pool
from inference.rendering.prompts import refuse_endless

#: The tokens before the prefix, the suffix and the middle. A vocabulary that has all three of a
#: form belongs to a model that was trained with it.
FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


def infill_tokens(tokenizer: Tokenizer) -> tuple[int, int, int]:
    """The three tokens. Raises `UnsupportedField` for a model without any."""
    ids = {text: token for token, text in tokenizer.added_tokens.items()}
    for form in FORMS:
        if all(text in ids for text in form):
            prefix, suffix, middle = (ids[text] for text in form)
            return prefix, suffix, middle
    raise UnsupportedField(
        "This model has no tokens for filling in the middle: 'suffix' is not supported.",
        param="suffix",
    )


async def infill_token_ids(
    tokenizer: Tokenizer,
    model: ModelInfo,
    prefixes: Sequence[str],
    suffix: str,
    *,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """Token ids of each prefix with the suffix. Control tokens in them stay text.

    Raises:
        InvalidRequest: the model can't, an empty prefix, one too long to fit in any case.
    """
    before, between, after = infill_tokens(tokenizer)
    for prefix in prefixes:
        if not prefix:
            raise InvalidRequest("prompt must not be empty.", param="prompt")
        refuse_endless(len(prefix) + len(suffix), model, "prompt")

    def encode_all() -> list[list[int]]:
        start = tokenizer.encode("", add_special_tokens=add_special_tokens)
        end = [between, *tokenizer.encode_plain(suffix, inside=True), after]
        return [[*start, before, *tokenizer.encode_plain(p, inside=True), *end] for p in prefixes]

    return await render_pool().run(sum(map(len, prefixes)) + len(suffix), encode_all)
