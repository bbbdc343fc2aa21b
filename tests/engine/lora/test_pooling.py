"""Vectors of a decoder with an adapter are those of PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from engine import LLM, LoRARequest

from .peft_oracle import checkpoint, make_adapter, prompts
from .test_peft_equality import ALL


def test_vectors_are_those_of_peft(tmp_path: Path) -> None:
    folder = checkpoint("qwen2", tmp_path / "model")
    adapter = make_adapter(folder, tmp_path / "adapter", target_modules=ALL)
    llm = LLM(str(folder), dtype="float32", runner="pooling", convert="embed", max_num_seqs=4)
    request, texts = LoRARequest("a", 1, str(adapter)), prompts(5)
    asked = [None, request, request, None, request]
    found = llm.embed(
        [{"prompt_token_ids": each} for each in texts], use_tqdm=False, lora_request=asked
    )
    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = [_vector(base, each) for each in texts]
    adapted = PeftModel.from_pretrained(base, adapter).eval()
    for index, own in enumerate(asked):
        if own is not None:
            plain, expected[index] = expected[index], _vector(adapted, texts[index])
            assert (plain - expected[index]).abs().max() > 0.01
    for result, vector in zip(found, expected, strict=True):
        torch.testing.assert_close(
            torch.tensor(result.outputs.embedding), vector, rtol=1e-4, atol=1e-4
        )


def _vector(model: Any, tokens: list[int]) -> torch.Tensor:
    """The last token's hidden state, at length 1."""
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1]
    return torch.nn.functional.normalize(states[0, -1], dim=0)
