"""Random token prompts: the same for the same seed, on every machine and for every peer."""

from __future__ import annotations

import random
from typing import NamedTuple

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
