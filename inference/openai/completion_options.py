"""What of a completion request shapes its answer, in one place for both forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.contract.protocol import TokenLogprobs
from inference.generation import Job
from inference.openai.logprobs import TokenNames, echo_logprobs
from inference.openai.schemas import CompletionRequest


@dataclass(frozen=True)
class CompletionOptions:
    """Attributes:
    n: outputs to return for each prompt.
    echoes: [num_prompts] the prompts as texts, or [] without `echo`.
    logprobs: alternatives a token, None for no log probabilities.
    service_tier, metadata: to be shown with the answer.
    shows_output: False when only the prompt was to be scored.
    echoes_ids: the prompts came as token ids: special ones are part of the echo.
    """

    n: int
    echoes: list[str]
    logprobs: int | None
    names: TokenNames
    shows_output: bool
    return_token_ids: bool
    include_usage: bool
    continuous_usage: bool
    shows_prompt_logprobs: bool
    service_tier: str | None = None
    metadata: dict[str, str] | None = None
    echoes_ids: bool = False

    @classmethod
    def of(cls, completion: CompletionRequest, job: Job) -> CompletionOptions:
        """The options of a checked request."""
        echoes = []
        given_ids = bool(completion.prompts) and not isinstance(completion.prompts[0], str)
        if completion.echo:
            tokenizer = job.served.tokenizer
            for prompt, token_ids in zip(completion.prompts, job.prompts, strict=True):
                whole = not given_ids and completion.truncate_prompt_tokens is None
                echo = str(prompt) if whole else tokenizer.decode(token_ids, not given_ids)
                echoes.append(echo)
        return cls(
            n=completion.n or 1,
            echoes=echoes,
            logprobs=completion.logprobs,
            names=TokenNames(job.served.tokenizer, as_ids=completion.tokens_as_ids),
            shows_output=not completion.scores_prompt_only,
            return_token_ids=bool(completion.return_token_ids),
            include_usage=completion.include_usage,
            continuous_usage=completion.continuous_usage,
            shows_prompt_logprobs=completion.prompt_logprobs is not None,
            service_tier=completion.tier(job.caller.max_priority)[1],
            metadata=completion.metadata,
            echoes_ids=given_ids,
        )

    def echo(self, number: int) -> str:
        """What stands before the outputs of a prompt."""
        return self.echoes[number] if self.echoes else ""

    def echo_logprobs(
        self, prompt: list[int], scores: list[TokenLogprobs | None] | None
    ) -> dict[str, Any] | None:
        """The echoed prompt's log probabilities, when both are asked for."""
        if not self.echoes or self.logprobs is None or scores is None:
            return None
        return echo_logprobs(prompt, scores, self.names, shows_special=self.echoes_ids)
