"""Names of `vllm.inputs`."""

from engine.offline.inputs import (
    EmbedsPrompt,
    PromptInputs,
    PromptStrictInputs,
    PromptType,
    TextPrompt,
    TokensPrompt,
)

__all__ = [
    "EmbedsPrompt",
    "PromptInputs",
    "PromptStrictInputs",
    "PromptType",
    "TextPrompt",
    "TokensPrompt",
]
