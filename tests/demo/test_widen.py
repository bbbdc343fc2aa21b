"""The demo model in a larger shape says what the demo model says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.widen import HERE, widen

PROMPTS = (
    "<|im_start|>user\nSay the words ink and 3365<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is the capital of Chad?<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.mark.parametrize("layers", [0, 9])
def test_a_widened_model_gives_the_same_logits(layers: int, tmp_path: Path) -> None:
    widen(HERE / "model", tmp_path, 4, layers)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    small, wide = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (HERE / "model", tmp_path)
    )
    assert wide.config.hidden_size == 4 * small.config.hidden_size
    assert len(wide.model.layers) == (layers or len(small.model.layers))
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            expected, logits = small(tokens).logits, wide(tokens).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("factor", [0, 1, 2, 3, 8, 9])
def test_factors_that_norms_cannot_make_up_for_are_refused(factor: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4, 16, 64"):
        widen(HERE / "model", tmp_path, factor)


def test_fewer_layers_than_the_model_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 6 layers; got 3"):
        widen(HERE / "model", tmp_path / "never", 4, 3)
    assert not (tmp_path / "never").exists()
