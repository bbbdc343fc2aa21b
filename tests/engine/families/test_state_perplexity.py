"""Perplexity of a trained model whose states are kept in few bits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from engine import LLM, SamplingParams
from tests.survey.recipes import VOCAB
from tests.survey.tiny import write_tokenizer

#: Of the tokens that texts repeat; the model must remember which ones they are.
PERIODS, LENGTH = (3, 6), 64
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


def texts(count: int, seed: int) -> torch.Tensor:
    """Texts that repeat some random tokens of twenty."""
    source = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        period = int(torch.randint(*PERIODS, (1,), generator=source))
        row = torch.randint(4, 24, (period,), generator=source)
        rows.append(row.repeat(LENGTH // period + 1)[:LENGTH])
    return torch.stack(rows)


def train(folder: Path) -> None:
    config = Mamba2Config(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, state_size=32, num_heads=8,
        head_dim=16, n_groups=1, chunk_size=16, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(250):
        batch = texts(16, step)
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    write_tokenizer(folder)


def perplexity(folder: Path, dtype: str) -> float:
    llm = LLM(
        str(folder), dtype="float32", num_gpu_blocks_override=100, max_model_len=80,
        mamba_ssm_cache_dtype=dtype,
    )  # fmt: skip
    prompts = texts(24, 10_000).tolist()
    scores = [
        output.prompt_logprobs[position][prompt[position]].logprob
        for prompt, output in zip(
            prompts, llm.generate(prompts, SCORED, use_tqdm=False), strict=True
        )
        for position in range(PERIODS[1], LENGTH)
    ]
    return math.exp(-sum(scores) / len(scores))


@pytest.mark.slow
def test_states_in_few_bits_cost_next_to_no_perplexity(tmp_path: Path) -> None:
    train(tmp_path)
    expected = perplexity(tmp_path, "float32")
    assert expected < 12  # of 20 tokens: it has learned to look back
    assert perplexity(tmp_path, "bfloat16") == pytest.approx(expected, rel=0.002)
    assert perplexity(tmp_path, "int8") == pytest.approx(expected, rel=0.005)
