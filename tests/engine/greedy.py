"""Greedy tokens of a model of `transformers`, of all prompts at once.

Its own `generate` goes token by token and prompt by prompt, and what it does beside the arithmetic
is nearly all of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tokens = list[int]


def greedy_all(
    model: Any, prompts: Sequence[Tokens], count: int, guesses: Sequence[Tokens] | None = None
) -> list[Tokens]:
    """Exactly `count` tokens of each prompt, EOS ignored, whatever is guessed.

    Args:
        model: a causal one, in float32: what stands behind a token changes nothing of it, so that
            prompts of any lengths go together, padded at their ends.
        guesses: what is likely said. Tokens that the model says too need no pass of their own.
    """
    guessed = [list(guess)[:count] for guess in guesses or [[]] * len(prompts)]
    outputs: list[Tokens] = [[] for _ in prompts]
    while any(len(tokens) < count for tokens in outputs):
        texts = [
            [*prompt, *tokens, *(guess[len(tokens) :] if guess[: len(tokens)] == tokens else ())]
            for prompt, tokens, guess in zip(prompts, outputs, guessed, strict=True)
        ]
        longest = max(map(len, texts))
        padded = [text + [text[-1]] * (longest - len(text)) for text in texts]
        with torch.no_grad():
            best = model(torch.tensor(padded), use_cache=False).logits.argmax(-1).tolist()
        for prompt, text, tokens, row in zip(prompts, texts, outputs, best, strict=True):
            for index in range(len(prompt) + len(tokens) - 1, len(text)):
                if len(tokens) == count:
                    break
                tokens.append(row[index])
                if text[index + 1 : index + 2] != [
                    row[index]
                ]:  # the rest of the guess is of another text
                    break
    return outputs
