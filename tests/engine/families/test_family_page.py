"""The model family of docs/extending.md, followed to the letter."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.models import registry as architectures
from engine.models import registry as plugins
from engine.models.decoder import NativeDecoder
from tests.engine.pages import install
from tests.engine.plain_paths import layer_by_layer
from tests.survey.recipes import RECIPES
from tests.survey.tiny import Oracle, make_checkpoint, prompts

OUTPUT = 6
RENAMED = {
    "model.embed_tokens": "wte",
    "model.norm": "out_norm",
    "model.layers.": "blocks.",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.o_proj": "attn.out",
    "mlp.gate_proj": "ffn.gate",
    "mlp.up_proj": "ffn.up",
    "mlp.down_proj": "ffn.down",
}


def as_mist(folder: Path) -> None:
    """Turn a checkpoint of Qwen 3 into one of the page's family."""
    config = json.loads((folder / "config.json").read_text())
    del config["head_dim"]
    config |= {"architectures": ["MistForCausalLM"], "model_type": "mist"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A checkpoint of the family, what `transformers` says, and the page's package installed."""
    folder, site = tmp_path / "checkpoint", tmp_path / "site"
    site.mkdir()
    make_checkpoint(RECIPES["qwen3"], folder)
    oracle = Oracle(folder)
    asked = prompts((1, 17, 48, 90))
    expected = [oracle.greedy(prompt, OUTPUT) for prompt in asked]
    as_mist(folder)
    install("A model family", "quire_mist", site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(plugins, "_loaded", set())
    monkeypatch.setattr(architectures, "_FAMILIES", dict(architectures._FAMILIES))
    monkeypatch.setenv("QUIRE_PLUGINS", "mist")
    yield folder, asked, expected
    sys.modules.pop("quire_mist", None)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_family_gives_the_tokens_of_transformers(checkpoint: Any, compiled: bool) -> None:
    folder, asked, expected = checkpoint
    with nullcontext() if compiled else layer_by_layer():
        llm = LLM(
            str(folder), dtype="float32", num_gpu_blocks_override=64, max_model_len=128,
            device="cpu",
        )  # fmt: skip
    model = llm.core.executor.worker.loaded.model
    assert isinstance(model, NativeDecoder)
    assert model.description.layers[1].attention.qkv.parts[0].name == "blocks.1.attn.q"
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    outputs = llm.generate(asked, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected


def test_a_missing_weight_is_named(checkpoint: Any) -> None:
    folder, *_ = checkpoint
    tensors = load_file(folder / "model.safetensors")
    del tensors["blocks.1.ffn.up.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match=r"blocks\.1\.ffn\.up\.weight"):
        LLM(str(folder), device="cpu", max_model_len=128)
