"""The training loop: the same from the same seed, and resumable."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from demo import train


@pytest.fixture(scope="module")
def tiny(tokenizer) -> LlamaConfig:
    config = train.config(tokenizer)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 2}
    config.update({**sizes, "layer_types": None})
    return config


def new_run(config: LlamaConfig) -> tuple[LlamaForCausalLM, train.Optimizer]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    return model, train.Optimizer(model)


def run(model, optimizer, batches) -> list[float]:
    losses = []
    for batch in batches:
        loss = train.loss_of(model, model.model, batch)
        train.update(model, optimizer, loss, 1.0)
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def some_batches(tokenizer):
    """As they are drawn, but short ones: a step computes all logits of all positions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "TOKENS_A_STEP", 2 * train.SHORT)
        stream = train.batches(tokenizer, seed=1)
        return [next(stream) for _ in range(3)]


def test_training_learns_and_repeats_itself(tiny, some_batches):
    losses = run(*new_run(tiny), some_batches)
    assert losses[-1] < losses[0]
    assert losses == run(*new_run(tiny), some_batches)


def test_a_checkpoint_goes_on_where_it_stopped(tiny, some_batches, tmp_path):
    model, optimizer = new_run(tiny)
    run(model, optimizer, some_batches[:1])
    train.save_checkpoint(tmp_path, model, optimizer, step=1)
    rest = run(model, optimizer, some_batches[1:])
    again, its_optimizer = new_run(tiny)
    assert train.load_checkpoint(tmp_path, again, its_optimizer) == 1
    assert run(again, its_optimizer, some_batches[1:]) == rest


def test_without_a_checkpoint_it_starts_at_the_beginning(tiny, tmp_path):
    assert train.load_checkpoint(tmp_path, *new_run(tiny)) == 0


def test_the_learning_rate_warms_up_and_falls():
    rates = [train.schedule(step, 1000) for step in range(1000)]
    assert rates[0] < rates[99] == pytest.approx(max(rates), rel=0.01)
    assert rates[-1] < 0.03 * max(rates)
