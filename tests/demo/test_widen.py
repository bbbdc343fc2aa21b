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


def test_a_widened_model_gives_the_same_logits(tmp_path: Path) -> None:
    widen(HERE / "model", tmp_path, 4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    small, wide = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (HERE / "model", tmp_path)
    )
    assert wide.config.hidden_size == 4 * small.config.hidden_size
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            expected, found = small(tokens).logits, wide(tokens).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("factor", [0, 1, 2, 3, 8, 9])
def test_factors_that_norms_cannot_make_up_for_are_refused(factor: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4, 16, 64"):
        widen(HERE / "model", tmp_path, factor)
