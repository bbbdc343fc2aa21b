"""Names of `vllm.inputs`."""

from engine.contract.unavailable import INPUT_REGISTRY
from engine.inputs.registry import InputContext, InputRegistry
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

#: vLLM's earlier name.
LLMInputs = TokensPrompt
