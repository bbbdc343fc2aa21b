"""Adapters in GGUF files say what the PEFT adapters say that they were made of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file

from engine import LoRARequest
from engine.contract.errors import InvalidRequest
from engine.contract.lora import CONFIG_FILE, WEIGHTS_FILE
from engine.lora.check import check_adapter
from engine.lora.reader import read_adapter
from engine.lora.target_modules import TargetModules
from engine.models.registry import decoder_spec, read_config

from .adapters import DEMO_MODEL, PIRATE
from .peft_oracle import PeftOracle, checkpoint, make_adapter, prompts
from .test_peft_equality import ALL, COUNT, generate, serve

_STEMS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def convert(adapter: Path, model: Path, path: Path, **metadata: Any) -> Path:
    """What llama.cpp's converter makes of a PEFT adapter of a Llama."""
    raw = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = json.loads((adapter / CONFIG_FILE).read_text(encoding="utf-8"))
    heads = {"attn_q": raw["num_attention_heads"], "attn_k": raw["num_key_value_heads"]}
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in load_file(adapter / WEIGHTS_FILE).items():
        values = tensor.float()
        if match := re.search(r"layers\.(\d+)\.(.+)\.lora_([AB])\.weight", name):
            stem, part = _STEMS[match[2]], match[3]
            if part == "B" and stem in heads:
                values = values.view(heads[stem], 2, -1, values.shape[1]).transpose(1, 2)
                values = values.reshape(tensor.shape)
            tensors[f"blk.{match[1]}.{stem}.weight.lora_{part.lower()}"] = values.numpy()
        elif name.endswith("lora_embedding_A"):
            tensors["token_embd.weight.lora_a"] = values.T.contiguous().numpy()
        elif name.endswith("lora_embedding_B"):
            tensors["token_embd.weight.lora_b"] = values.numpy()
        elif match := re.search(r"lm_head\.lora_([AB])\.weight", name):
            tensors[f"output.weight.lora_{match[1].lower()}"] = values.numpy()
    return write(path, tensors, alpha=float(config["lora_alpha"]), **metadata)


def write(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    alpha: float = 16.0,
    kind: str = "adapter",
    extra: str = "",
) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_type(kind)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    if extra:
        writer.add_uint32(extra, 1)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_tokens_are_those_of_peft(tmp_path: Path) -> None:
    model = checkpoint("llama", tmp_path / "model")
    targets = [*ALL, "embed_tokens", "lm_head"]
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=targets)
    request = LoRARequest("a", 1, str(convert(adapter, model, tmp_path / "a.gguf")))
    mixed = [(prompt, "a" if index % 3 else None) for index, prompt in enumerate(prompts(6))]
    asked = [(prompt, None if has_adapter is None else request) for prompt, has_adapter in mixed]
    llm = serve(model)
    ours = generate(llm, asked)
    expected = PeftOracle(model, {"a": adapter}).greedy_all(mixed, COUNT, ours)
    assert ours == expected
    assert generate(llm, asked[1:2]) == expected[1:2]
    verdict = check_adapter(str(model), Path(request.lora_path), probe=True)
    assert verdict.error is None
    assert verdict.probe is not None
    assert verdict.probe.passed


def test_experts_of_one_tensor_are_told_apart(tmp_path: Path) -> None:
    modules = TargetModules(decoder_spec(read_config(checkpoint("mixtral", tmp_path / "model"))))
    inner = modules.layers[0]["down.0"].columns
    a = np.random.default_rng(0).normal(size=(4, 3, inner)).astype(np.float16)
    b = np.random.default_rng(1).normal(size=(4, 64, 3)).astype(np.float16)
    name = "blk.1.ffn_down_exps.weight.lora"
    path = write(tmp_path / "x.gguf", {f"{name}_a": a, f"{name}_b": b}, alpha=6.0)
    modules_read = read_adapter(path, modules).modules
    assert len(modules_read) == 4
    delta = modules_read["model.layers.1.block_sparse_moe.experts.2.w2"]
    assert delta.scale == 2.0
    assert delta.a is not None
    assert delta.b is not None
    assert torch.equal(delta.a, torch.from_numpy(a[2]))
    assert torch.equal(delta.b, torch.from_numpy(b[2]))


Tensors = dict[str, np.ndarray]
Q = "blk.0.attn_q.weight.lora"


def good() -> Tensors:
    return {f"{Q}_a": np.ones((2, 256), np.float32), f"{Q}_b": np.ones((256, 2), np.float32)}


def _drop(tensors: Tensors) -> str:
    del tensors[f"{Q}_b"]
    return f"{Q}_a"


def _narrow(tensors: Tensors) -> str:
    tensors[f"{Q}_a"] = tensors[f"{Q}_a"][:, :32]
    return f"{Q}_a"


def _nan(tensors: Tensors) -> str:
    tensors[f"{Q}_b"][3, 1] = np.nan
    return f"{Q}_b"


def _norm(tensors: Tensors) -> str:
    tensors["blk.0.attn_norm.weight"] = np.ones(256, np.float32)
    return "blk.0.attn_norm.weight"


def _more_tokens(tensors: Tensors) -> str:
    tensors["token_embd.weight.lora_a"] = np.ones((9999, 2), np.float32)
    tensors["token_embd.weight.lora_b"] = np.ones((256, 2), np.float32)
    return "token_embd.weight.lora_a"


def _elsewhere(tensors: Tensors) -> str:
    tensors[f"blk.99{Q[5:]}_a"] = np.ones((2, 256), np.float32)
    return f"blk.99{Q[5:]}_a"


@pytest.mark.parametrize("spoil", [_drop, _narrow, _nan, _norm, _more_tokens, _elsewhere])
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, spoil: Callable[[Tensors], str]
) -> None:
    tensors = good()
    named = spoil(tensors)
    error = check_adapter(DEMO_MODEL, write(tmp_path / "x.gguf", tensors)).error
    assert error is not None
    assert error["param"] == named
    assert ("is for a vocabulary of 9999 tokens" in error["message"]) == (spoil is _more_tokens)


def test_models_and_other_adapters_are_refused(tmp_path: Path) -> None:
    modules = TargetModules(decoder_spec(read_config(DEMO_MODEL)))
    with pytest.raises(InvalidRequest, match="must be adapter"):
        read_adapter(write(tmp_path / "m.gguf", good(), kind="model"), modules)
    key = "adapter.alora.invocation_tokens"
    with pytest.raises(InvalidRequest, match="isn't supported") as refused:
        read_adapter(write(tmp_path / "x.gguf", good(), extra=key), modules)
    assert refused.value.param == key
    with pytest.raises(InvalidRequest, match=r"rank 2 is over max_lora_rank \(1\)"):
        read_adapter(write(tmp_path / "y.gguf", good()), modules, 1)
    for number, content in enumerate((b"", b"GGUF", b"\x80\x04K\x01.")):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        with pytest.raises(InvalidRequest, match="can't be read"):
            read_adapter(path, modules)


def test_the_demo_adapter_is_the_same_in_both_formats(tmp_path: Path) -> None:
    modules = TargetModules(decoder_spec(read_config(DEMO_MODEL)))
    path = convert(PIRATE, Path(DEMO_MODEL), tmp_path / "pirate.gguf")
    one, other = read_adapter(PIRATE, modules), read_adapter(path, modules)
    assert one.digest != other.digest
    assert one.modules.keys() == other.modules.keys()
    for name, delta in one.modules.items():
        assert delta.b is not None
        assert torch.equal(delta.b.float(), other.modules[name].b)
        assert delta.scale == other.modules[name].scale
