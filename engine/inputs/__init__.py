"""Names of `vllm.inputs`."""

from engine.inputs.registry import InputContext, InputRegistry
from engine.multimodal.registry import INPUT_REGISTRY, LLMInputs
from engine.offline.inputs import (
    EmbedsPrompt,
    PromptInputs,
    PromptStrictInputs,
    PromptType,
    TextPrompt,
    TokensPrompt,
)

__all__ = [
    "INPUT_REGISTRY",
    "EmbedsPrompt",
    "InputContext",
    "InputRegistry",
    "LLMInputs",
    "PromptInputs",
    "PromptStrictInputs",
    "PromptType",
    "TextPrompt",
    "TokensPrompt",
]
