"""What of a chat request shapes its answer, in one place for both forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.sampling_params import SamplingParams
from engine.text import Tokenizer
from inference.errors import UnsupportedField
from inference.generation import Served
from inference.openai.logprobs import TokenNames
from inference.openai.schemas import ChatRequest
from inference.tools import ToolParser, parser_for_template
from inference.tools.hermes import OPEN


@dataclass(frozen=True)
class ParserChoice:
    """How calls are read from each output."""

    make: Callable[[], ToolParser]
    parallel: bool

    def prepare(self, sampling: SamplingParams, tokenizer: Tokenizer) -> None:
        """Keep the tags in the text where they are special tokens."""
        if OPEN in tokenizer.special_tokens:
            sampling.skip_special_tokens = False


@dataclass(frozen=True)
class ChatOptions:
    """Attributes:
    role: the answer's. echo: text before it. top_logprobs: None for no log probabilities.
    """

    n: int
    role: str
    echo: str
    top_logprobs: int | None
    names: TokenNames
    parser: ParserChoice | None
    return_token_ids: bool
    include_usage: bool
    continuous_usage: bool

    @classmethod
    def of(cls, chat: ChatRequest, served: Served) -> ChatOptions:
        """Raises `UnsupportedField` for tools that the model has no use for."""
        last = chat.messages[-1]
        role = "assistant" if chat.add_generation_prompt else last.role
        echoes = chat.echo and last.role == role and isinstance(last.content, str)
        return cls(
            n=chat.n or 1,
            role=role,
            echo=str(last.content) if echoes else "",
            top_logprobs=chat.logprobs_wanted,
            names=TokenNames(served.tokenizer, as_ids=bool(chat.return_tokens_as_token_ids)),
            parser=choose_parser(chat, served),
            return_token_ids=bool(chat.return_token_ids),
            include_usage=chat.include_usage,
            continuous_usage=chat.continuous_usage,
        )


def choose_parser(chat: ChatRequest, served: Served) -> ParserChoice | None:
    """The parser for the model's calls, or None when the request offers no tools."""
    if chat.tools_in_use is None:
        return None
    template = served.tokenizer.chat_template or ""
    make = parser_for_template(template)
    if "tools" not in template or make is None:
        raise UnsupportedField(
            f"The model '{served.name}' was not trained to call tools in a way that is supported.",
            param="tools",
        )
    return ParserChoice(make, chat.parallel_tool_calls is not False)
