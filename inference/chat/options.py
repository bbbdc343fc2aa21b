"""What of a chat request shapes its answer, in one place for every form of it."""

from __future__ import annotations

from dataclasses import dataclass

from inference.chat.output_parser import ParserPlan
from inference.generation import Job
from inference.openai.logprobs import TokenNames
from inference.openai.schemas import ChatRequest
from inference.settings import gateway_settings


@dataclass(frozen=True)
class ChatOptions:
    """Attributes:
    role: the answer's. echo: text before it. top_logprobs: None for no log probabilities.
    service_tier, metadata: to be shown with the answer.
    parsers: how reasoning and calls are found in each output.
    unfollowed: fields that this model has no use for.
    asks_tokens: log probabilities are wanted of tokens that the client named.
    """

    n: int
    role: str
    echo: str
    top_logprobs: int | None
    names: TokenNames
    parsers: ParserPlan
    return_token_ids: bool
    include_usage: bool
    continuous_usage: bool
    service_tier: str | None = None
    metadata: dict[str, str] | None = None
    unfollowed: tuple[str, ...] = ()
    asks_tokens: bool = False

    @classmethod
    def of(
        cls, chat: ChatRequest, job: Job, parsers: ParserPlan, unfollowed: tuple[str, ...] = ()
    ) -> ChatOptions:
        """The options of a checked request."""
        last = chat.messages[-1]
        role = gateway_settings().response_role if chat.add_generation_prompt else last.role
        echoes = chat.echo and last.role == role and isinstance(last.content, str)
        return cls(
            n=chat.n or 1,
            role=role,
            echo=str(last.content) if echoes else "",
            top_logprobs=chat.logprobs_wanted,
            names=TokenNames(job.served.tokenizer, as_ids=chat.tokens_as_ids),
            parsers=parsers,
            return_token_ids=bool(chat.return_token_ids),
            include_usage=chat.include_usage,
            continuous_usage=chat.continuous_usage,
            service_tier=chat.tier(job.caller.max_priority)[1],
            metadata=chat.metadata,
            unfollowed=unfollowed,
            asks_tokens=chat.logprob_token_ids is not None,
        )
