"""The demo model's draft as it ships."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from demo.train_draft import config, initial
from engine import LLM, SamplingParams
from tests.engine.speculative.free import make_drafts_free

DRAFT = Path("demo/draft")
QUESTIONS = ("Tell me a story about a fox.", "What is 23 + 41?", "What is the capital of France?")


def test_it_has_the_models_tokens_and_a_fifth_of_its_size(shipped):
    assert (DRAFT / "tokenizer.json").read_bytes() == (shipped / "tokenizer.json").read_bytes()
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (DRAFT, shipped)]
    assert 5 * sizes[0] < sizes[1]


def test_it_begins_as_the_model_in_fewer_directions(shipped):
    target = LlamaForCausalLM.from_pretrained(shipped, dtype=torch.float32)
    draft = initial(target)
    assert draft.config.hidden_size == config(target.config).hidden_size
    embeddings = [draft_model.model.embed_tokens.weight for draft_model in (draft, target)]
    near, far = (weight[:64] @ weight[:64].T for weight in embeddings)
    assert (near - far).norm() < 0.7 * far.norm()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_most_of_what_it_draws_is_the_models_own(shipped, temperature, monkeypatch):
    make_drafts_free(monkeypatch)
    settings = {"model": str(shipped), "max_model_len": 512, "dtype": "float32"}
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=temperature, max_tokens=60, seed=5)
    baseline_outputs = LLM(**settings).chat(asked, params, use_tqdm=False)
    llm = LLM(**settings, speculative_config={"model": str(DRAFT), "num_speculative_tokens": 4})
    drafted = llm.chat(asked, params, use_tqdm=False)
    assert [result.outputs[0].token_ids for result in drafted] == [
        result.outputs[0].token_ids for result in baseline_outputs
    ]
    stats = llm.core.stats
    drafts, allocated_spec_decode_num_accepted_tokens_total = (
        stats.spec_decode_num_draft_tokens_total,
        stats.spec_decode_num_accepted_tokens_total,
    )
    assert drafts > 60
    assert allocated_spec_decode_num_accepted_tokens_total > 0.75 * drafts
