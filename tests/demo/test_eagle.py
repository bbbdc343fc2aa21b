"""An EAGLE head of the demo model, by the script."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from demo.rows import Batch
from demo.train_eagle import Head, loss_of, save
from demo.widen import widen
from engine import LLM, SamplingParams
from tests.engine.speculative.free import make_drafts_free

_LENGTH = 24


@pytest.fixture(scope="module")
def target(shipped: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(shipped, dtype=torch.float32).requires_grad_(False)


@pytest.fixture
def head(target: LlamaForCausalLM) -> Head:
    torch.manual_seed(0)
    return Head(target.config)


def two_conversations() -> Batch:
    """Side by side in one row."""
    torch.manual_seed(1)
    tokens = torch.randint(10, 3000, (1, _LENGTH))
    document = (torch.arange(_LENGTH) >= _LENGTH // 2).long()
    same = document[:, None] == document[None, :]
    mask = (same & torch.ones(_LENGTH, _LENGTH).tril().bool())[None, None]
    labels = torch.cat((tokens[:, 1:], torch.full((1, 1), -100)), dim=1)
    return Batch(tokens, labels, mask, torch.arange(_LENGTH)[None])


def test_it_learns_what_follows_in_each_conversation_alone(
    target: LlamaForCausalLM, head: Head
) -> None:
    batch = two_conversations()
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = loss_of(head, target, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    torch.manual_seed(2)
    loss = loss_of(head, target, batch)
    batch.tokens[:, 0] = 5  # of the first one
    batch.labels[:, : _LENGTH // 2] = -100
    torch.manual_seed(2)
    second = loss_of(head, target, batch)
    batch.tokens[:, 0] = 6
    torch.manual_seed(2)
    assert loss_of(head, target, batch).item() == pytest.approx(second.item(), abs=1e-6)
    assert loss.item() != second.item()


def test_what_it_writes_gives_drafts_that_change_nothing(
    shipped: Path, target: LlamaForCausalLM, head: Head, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    make_drafts_free(monkeypatch)
    save(head, target.config, tmp_path / "head")
    settings = {"model": str(shipped), "max_model_len": 256, "dtype": "float32"}
    config = {"method": "eagle", "model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    asked = [[{"role": "user", "content": "What is the capital of France?"}]]
    params = SamplingParams(temperature=0, max_tokens=12)
    (baseline_output,) = LLM(**settings).chat(asked, params, use_tqdm=False)
    llm = LLM(**settings, speculative_config=config)
    (drafted,) = llm.chat(asked, params, use_tqdm=False)
    assert drafted.outputs[0].token_ids == baseline_output.outputs[0].token_ids
    assert llm.core.stats.spec_decode_num_draft_tokens_total > 5


def test_a_widened_head_says_the_same_of_a_widened_models_states(
    target: LlamaForCausalLM, head: Head, tmp_path: Path
) -> None:
    save(head, target.config, tmp_path / "head")
    widen(tmp_path / "head", tmp_path / "wide", 4)
    narrow, wide = (
        load_file(tmp_path / name / "model.safetensors")["fc.weight"] for name in ("head", "wide")
    )
    size = target.config.hidden_size
    embedded, state = torch.randn(size).bfloat16(), torch.randn(size).bfloat16()
    zeros = torch.zeros(3 * size).bfloat16()
    product = wide.float() @ torch.cat((embedded, zeros, state, zeros)).float()
    expected = narrow.float() @ torch.cat((embedded, state)).float()
    assert torch.allclose(product[:size], expected, atol=1e-4)
    assert not product[size:].any()
