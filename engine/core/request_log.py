"""The log's line about a request, with `enable_log_requests`."""

from __future__ import annotations

import logging

from engine.contract.messages import EngineRequest
from engine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

#: The text's tokens in a line: decoding a whole context would delay a step.
MAX_LOGGED_TOKENS = 512


def log_request(message: EngineRequest, tokenizer: Tokenizer | None) -> None:
    """Log its lengths, and the start of its prompt if the tenant allows that.

    Args:
        tokenizer: the model's; None for a prompt without text. Prompts for an adapter with another
            tokenizer are logged without text.

    Raises `EngineFault` if the tokenizer can't decode the prompt.
    """
    adapter = message.adapter
    text = ""
    if message.log_prompt and tokenizer is not None and not (adapter and adapter.tokenizer):
        ids = message.prompt_token_ids[:MAX_LOGGED_TOKENS]
        text = f" Prompt: {tokenizer.decode(ids, skip_special_tokens=False)!r}."
    log.info(
        "Received request %s: %d prompt tokens, max_tokens %s, adapter %s.%s",
        message.request_id,
        len(message.prompt_token_ids),
        message.sampling.max_tokens,
        adapter.name if adapter else "none",
        text,
    )
