"""Adapters of vision towers and their connectors: PEFT's tokens, and pictures encoded for each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, LoRARequest, SamplingParams
from engine.lora.check import check_adapter
from tests.engine.lora.peft_oracle import save
from tests.engine.multimodal.models import FAMILIES, IMAGE_TOKEN, expected, picture

NUM_TOKENS = 8
#: In the text model, the tower and the connector.
TARGETS = {
    "llava": ["q_proj", "down_proj", "out_proj", "fc1", "linear_2"],
    "qwen2_vl": ["v_proj", "up_proj", "qkv", "attn.proj", "fc2", "mlp.0"],
}
IMAGE = {"llava": IMAGE_TOKEN, "qwen2_vl": f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>"}


def train_adapter(model: Any, folder: Path, targets: list[str], **options: Any) -> Any:
    """PEFT's model with a random adapter, which is saved."""
    from peft import LoraConfig, get_peft_model  # takes seconds, in each process that collects

    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=targets, **options)
    adapted = get_peft_model(model, config).eval()
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape) * 0.3
    save(adapted, folder)
    return adapted


@pytest.mark.parametrize("name", sorted(TARGETS))
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_of_towers_and_connectors_give_pefts_tokens(
    tmp_path: Path, name: str, dora: bool
) -> None:
    model, processor = FAMILIES[name](tmp_path / "model")
    image = picture(1, 60, 40)
    prompt = f"See {IMAGE[name]} here."
    base_tokens = expected(model, processor, prompt, [image], NUM_TOKENS)
    adapted = train_adapter(model, tmp_path / "all", TARGETS[name], use_dora=dora)
    adapted_tokens = expected(adapted, processor, prompt, [image], NUM_TOKENS)
    assert adapted_tokens != base_tokens
    adapter = LoRARequest("all", 1, str(tmp_path / "all"))
    assert check_adapter(str(tmp_path / "model"), tmp_path / "all", probe=True).ok
    llm = LLM(
        str(tmp_path / "model"), dtype="float32", num_gpu_blocks_override=128, enable_lora=True
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    request = {"prompt": prompt, "multi_modal_data": {"image": image}}
    for _ in range(2):  # the second time from the cache
        # One picture, encoded by two towers in one step.
        results = llm.generate([request] * 3, params, lora_request=[None, adapter, None])
        tokens = [list(result.outputs[0].token_ids) for result in results]
        assert tokens == [base_tokens, adapted_tokens, base_tokens]
    cache = llm.llm_engine.core.scheduler.encoder_cache
    assert len(cache._entries) == 2
    cache.check_integrity()


def test_an_adapter_of_the_text_alone_shares_what_pictures_are_encoded_to(tmp_path: Path) -> None:
    model, _ = FAMILIES["llava"](tmp_path / "model")
    train_adapter(model, tmp_path / "text", ["q_proj"], exclude_modules=".*vision_tower.*")
    llm = LLM(
        str(tmp_path / "model"), dtype="float32", num_gpu_blocks_override=128, enable_lora=True
    )
    request = {
        "prompt": f"See {IMAGE_TOKEN}",
        "multi_modal_data": {"image": picture(1, 60, 40)},
    }
    adapters = [None, LoRARequest("text", 1, str(tmp_path / "text"))]
    llm.generate([request] * 2, SamplingParams(max_tokens=1), lora_request=adapters)
    assert len(llm.llm_engine.core.scheduler.encoder_cache._entries) == 1


def test_a_layer_that_no_tower_has_is_refused_by_its_tensor(tmp_path: Path) -> None:
    model, _ = FAMILIES["llava"](tmp_path / "model")
    train_adapter(model, tmp_path / "a", ["patch_embedding"])
    verdict = check_adapter(str(tmp_path / "model"), tmp_path / "a")
    assert verdict.error
    assert "patch_embedding" in json.dumps(verdict.error)
