"""Bodies of requests, checked by pydantic. Types are strict: "5" is no number, true is no 1."""

from inference.openai.schemas.chat import ChatBatchRequest, ChatRequest
from inference.openai.schemas.completions import CompletionRequest

__all__ = ["ChatBatchRequest", "ChatRequest", "CompletionRequest"]
