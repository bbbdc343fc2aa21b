"""What a model thinks before it answers, apart from the answer."""

from inference.reasoning.base import ReasoningParser
from inference.reasoning.registry import reasoning_parsers

__all__ = ["ReasoningParser", "reasoning_parsers"]
