"""Perplexity of a model on the text beside this file: held-out questions for the demo model.

A line holds a question, as the chat template writes it, and its answer; the answers are scored.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch

from engine import LLM, SamplingParams

DEMO = Path(__file__).parents[3] / "demo" / "model"
TEXT = Path(__file__).with_name("held_out.jsonl")
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
#: So many answers; all of them are for slow tests.
COUNTS = [40, pytest.param(None, marks=pytest.mark.slow)]


def perplexity(llm: LLM, count: int | None = None) -> float:
    """exp of the mean negative log probability of the answers' tokens; of so many answers."""
    tokenizer = llm.get_tokenizer()
    rows = [json.loads(line) for line in TEXT.read_text(encoding="utf-8").splitlines()][:count]
    questions = [tokenizer.encode(question) for question, _ in rows]
    answers = [tokenizer.encode(answer, add_special_tokens=False) for _, answer in rows]
    prompts = [question + answer for question, answer in zip(questions, answers, strict=True)]
    scores: list[float] = []
    for question, result in zip(
        questions, llm.generate(prompts, SCORED, use_tqdm=False), strict=True
    ):
        for position in range(len(question), len(result.prompt_token_ids)):
            scores.append(
                result.prompt_logprobs[position][result.prompt_token_ids[position]].logprob
            )
    return math.exp(-torch.tensor(scores, dtype=torch.float64).mean().item())


@cache
def demo_perplexity(
    quantization: str | None = None, compiled: bool = True, count: int | None = None
) -> float:
    """Of the demo model as its folder holds it; on so many answers."""
    llm = LLM(
        str(DEMO), quantization=quantization, cpu_kernels=compiled, num_gpu_blocks_override=500
    )
    return perplexity(llm, count)
