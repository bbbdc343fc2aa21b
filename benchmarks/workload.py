"""Prompts, random or of a dataset: the same for the same seed, on every machine, for every peer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from engine.contract.errors import ConfigError

#: The first ids of most vocabularies are special tokens; none is drawn.
FIRST_PLAIN_ID = 4


class Job(NamedTuple):
    """One request: its prompt, and how many tokens to generate."""

    prompt_token_ids: list[int]
    output_tokens: int


def random_jobs(
    count: int,
    vocab_size: int,
    prompt_tokens: tuple[int, int] = (128, 512),
    output_tokens: tuple[int, int] = (64, 128),
    seed: int = 7,
) -> list[Job]:
    """`count` jobs with lengths drawn from the two inclusive ranges."""
    rng = random.Random(seed)
    jobs = []
    for _ in range(count):
        length = rng.randint(*prompt_tokens)
        prompt = [rng.randint(FIRST_PLAIN_ID, vocab_size - 1) for _ in range(length)]
        jobs.append(Job(prompt, rng.randint(*output_tokens)))
    return jobs


#: Of vLLM's benchmark, so that figures compare: shorter texts and longer ones are left out.
MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048


def read_sharegpt(path: Path) -> list[tuple[str, str]]:
    """The first two turns of each conversation that has them.

    Raises `ConfigError` for a file that can't be read or isn't in ShareGPT's format.
    """
    try:
        conversations = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.", param="dataset") from error
    except ValueError as error:
        raise ConfigError(f"{path} isn't JSON: {error}.", param="dataset") from error
    try:
        turns = [conversation["conversations"][:2] for conversation in conversations]
        pairs = [(pair[0]["value"], pair[1]["value"]) for pair in turns if len(pair) == 2]
        is_sharegpt = all(isinstance(text, str) for pair in pairs for text in pair)
    except (KeyError, TypeError):
        is_sharegpt = False
    if not is_sharegpt:
        raise ConfigError(
            f'{path} must be a list of {{"conversations": [{{"value": TEXT}}, ...]}}.',
            param="dataset",
        )
    return pairs


def sharegpt_jobs(
    conversations: list[tuple[str, str]],
    encode: Callable[[str], list[int]],
    count: int,
    max_model_len: int,
    seed: int = 7,
) -> list[Job]:
    """Up to `count` jobs drawn from `read_sharegpt`'s pairs that fit the context.

    Raises `ConfigError` where none does.
    """
    jobs: list[Job] = []
    for prompt, reply in random.Random(seed).sample(conversations, len(conversations)):
        if len(jobs) == count:
            break
        job = Job(encode(prompt), len(encode(reply)))
        prompt_tokens = len(job.prompt_token_ids)
        if (
            min(prompt_tokens, job.output_tokens) >= MIN_TOKENS
            and prompt_tokens <= MAX_PROMPT_TOKENS
            and prompt_tokens + job.output_tokens <= min(MAX_TOTAL_TOKENS, max_model_len)
        ):
            jobs.append(job)
    if not jobs:
        raise ConfigError(
            f"No conversation of the dataset fits the model's context of {max_model_len}: a prompt "
            f"and a reply have at least {MIN_TOKENS} tokens each, and at most {MAX_TOTAL_TOKENS} "
            f"together, {MAX_PROMPT_TOKENS} of them the prompt's.",
            param="dataset",
        )
    return jobs
