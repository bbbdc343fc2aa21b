"""`LLM("file.gguf")` runs as the checkpoint that the file was made from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from engine import LLM, SamplingParams
from engine.contract.errors import ModelLoadError
from engine.models.decoder import NativeDecoder
from tests.engine.gguf.files import everywhere, write_gguf
from tests.engine.models import FAMILIES, make_model
from tests.engine.quantization.perplexity import demo_perplexity, perplexity
from tests.hub_cache import cache_files

DEMO = Path(__file__).parents[3] / "demo" / "model"
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9, 30, 31] * 12, [11]]
GEMMA2 = {
    "model_type": "gemma2", "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24,
    "tie_word_embeddings": True,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
MORE = {
    "gemma2": GEMMA2,
    "phi3": {"model_type": "phi3", "sliding_window": 24, "pad_token_id": 3},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": None},
    "qwen2_moe": {
        "model_type": "qwen2_moe", **MOE, "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 32, **MOE, "norm_topk_prob": True},
}  # fmt: skip
NAMES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
"""Architectures of GGUF that are called otherwise."""


@pytest.fixture(autouse=True)
def gguf_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written beside the weights goes to a cache of the test's own."""
    monkeypatch.setattr("engine.checkpoints.gguf.folder.cache_dir", lambda: tmp_path / "cache")


def make(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), num_gpu_blocks_override=200, max_model_len=128, **settings)


def tokens(llm: LLM) -> list[list[int]]:
    return [r.outputs[0].token_ids for r in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


FLOATS = [
    *((family, kind) for family in ("llama", "qwen2", "qwen3", "gemma2", "phi3")
      for kind in (Kind.F32, Kind.BF16, Kind.F16)),
    # Experts are read as all matrices are.
    *((family, Kind.F32) for family in NAMES),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "kind"), FLOATS, ids=lambda value: getattr(value, "name", value)
)
def test_floats_give_the_tokens_of_the_checkpoint(
    family: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family in MORE:
        monkeypatch.setitem(FAMILIES, family, MORE[family])
    folder = make_model(family, tmp_path / "checkpoint")
    name = NAMES.get(family, family)
    file = write_gguf(folder, tmp_path / "model.gguf", everywhere(kind), name)
    dtype = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}[kind.name]
    assert tokens(make(file)) == tokens(make(folder, dtype=dtype))


@pytest.mark.parametrize(
    ("kind", "tolerance"), [(Kind.Q8_0, 0.005), (Kind.Q5_0, 0.03), (Kind.Q4_0, 0.06)],
    ids=lambda value: getattr(value, "name", ""),
)  # fmt: skip
def test_quantized_files_stay_close_to_the_checkpoint(
    kind: Kind, tolerance: float, tmp_path: Path
) -> None:
    """By plain torch on a few answers, for it is slow; by the kernels, see test_perplexity.py."""
    file = write_gguf(DEMO, tmp_path / "model.gguf", everywhere(kind))
    if kind == Kind.Q5_0:  # which isn't there
        llm = LLM(str(file), num_gpu_blocks_override=500)
        assert perplexity(llm, 40) == pytest.approx(demo_perplexity(count=40), rel=tolerance)
    baseline_llm = LLM(str(file), num_gpu_blocks_override=500, cpu_kernels=False)
    expected = demo_perplexity(compiled=False, count=8)
    assert perplexity(baseline_llm, 8) == pytest.approx(expected, rel=2 * tolerance)


def test_mixed_types_in_one_layer(tmp_path: Path) -> None:
    """Q4_K_M keeps some values and down projections in other types than their neighbours."""

    def kind_of(name: str) -> Kind:
        if "attn_v" in name or name == "token_embd.weight":
            return Kind.Q6_K
        return Kind.Q4_K if "blk.0" in name else Kind.Q5_K

    folder = make_model("llama", tmp_path / "m", hidden_size=256, intermediate_size=512)
    file = write_gguf(folder, tmp_path / "mixed.gguf", kind_of)
    compiled, reference = make(file), make(file, cpu_kernels=False)
    model = compiled.core.executor.worker.loaded.model
    assert isinstance(model, NativeDecoder)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    results = [
        llm.generate([PROMPTS[1]], params, use_tqdm=False)[0].prompt_logprobs
        for llm in (compiled, reference)
    ]
    for position in range(1, len(PROMPTS[1])):
        token = PROMPTS[1][position]
        one, other = (result[position][token].logprob for result in results)
        assert one == pytest.approx(other, abs=0.15)


def test_a_file_can_be_rounded_further(tmp_path: Path) -> None:
    file = write_gguf(DEMO, tmp_path / "model.gguf", everywhere(Kind.BF16))
    llm = LLM(str(file), quantization="int8", num_gpu_blocks_override=500)
    baseline_llm = LLM(str(DEMO), num_gpu_blocks_override=500)
    assert (
        llm.core.executor.worker.loaded.model.decode_bytes
        < 0.6 * baseline_llm.core.executor.worker.loaded.model.decode_bytes
    )
    assert perplexity(llm, 40) == pytest.approx(demo_perplexity(count=40), rel=0.005)


def test_text_and_chat_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    file = write_gguf(DEMO, tmp_path / "model.gguf", everywhere(Kind.BF16))
    llm, baseline_llm = (LLM(str(m), num_gpu_blocks_override=500) for m in (file, DEMO))
    texts = ["Hello there, 123 wörld!\n  Bye.", "<|im_start|>user\nhi<|im_end|>", "日本語 ok"]
    for text in texts:
        assert llm.get_tokenizer().encode(text) == baseline_llm.get_tokenizer().encode(text)
    assert llm.core.facts.eos_token_ids == baseline_llm.core.facts.eos_token_ids
    messages = [{"role": "user", "content": "What is 3 plus 4?"}]
    params = SamplingParams(temperature=0, max_tokens=24)
    reported_texts = [
        m.chat(messages, params, use_tqdm=False)[0].outputs[0].text for m in (llm, baseline_llm)
    ]
    assert reported_texts[0] == reported_texts[1] != ""


def test_a_folder_with_one_file_and_no_config(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "checkpoint")
    (tmp_path / "model").mkdir()
    write_gguf(folder, tmp_path / "model" / "a.gguf", everywhere(Kind.F32))
    assert tokens(make(tmp_path / "model")) == tokens(make(folder))
    (tmp_path / "model" / "b.gguf").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="holds 2 GGUF files"):
        make(tmp_path / "model")


def test_a_model_in_parts(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "checkpoint")
    (tmp_path / "model").mkdir()
    write_gguf(folder, tmp_path / "model" / "a.gguf", everywhere(Kind.F32), tensors_a_file=12)
    parts = sorted((tmp_path / "model").iterdir())
    assert [part.name for part in parts] == [f"a-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    expected = tokens(make(folder))
    for named in (tmp_path / "model", parts[0], parts[2]):
        assert tokens(make(named)) == expected
    (tmp_path / "copy").mkdir()
    for part in parts:
        shutil.copy(part, tmp_path / "copy")
    snapshot = cache_files(tmp_path / "copy", tmp_path / "models--a--tiny")
    assert tokens(make(snapshot / parts[0].name)) == expected
    first, second = parts[0].read_bytes(), parts[1].read_bytes()
    parts[1].write_bytes(first)
    with pytest.raises(ModelLoadError, match=r"it is part 0 of 3, and not part 1 of 3"):
        make(parts[0])
    parts[1].unlink()
    with pytest.raises(ModelLoadError, match=r"a-00002-of-00003.gguf isn't there"):
        make(parts[0])
    (tmp_path / "model" / "whole.gguf").write_bytes(second)
    with pytest.raises(ModelLoadError, match="isn't there"):
        make(tmp_path / "model")


def test_quantized_experts_stay_in_few_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "mixtral", MORE["mixtral"])
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    folder = make_model("mixtral", tmp_path / "checkpoint", **sizes)

    def kind_of(name: str) -> Kind:
        return Kind.Q8_0 if "exps" in name else Kind.F32

    rounded = make(write_gguf(folder, tmp_path / "q8.gguf", kind_of))
    floats = make(write_gguf(folder, tmp_path / "f32.gguf", everywhere(Kind.F32)))
    sizes_of = [llm.core.executor.worker.loaded.model.decode_bytes for llm in (rounded, floats)]
    experts = 3 * 3 * 2 * 128 * 256  # layers, matrices, chosen experts
    assert sizes_of[1] - sizes_of[0] == pytest.approx(experts * (4 - 34 / 32), rel=0.01)
    agreed = [a[:3] == b[:3] for a, b in zip(tokens(rounded), tokens(floats), strict=True)]
    assert any(agreed)


def test_phi_3_has_factors_for_short_and_long_contexts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf
    import numpy as np

    factors = {
        "short": [1.0 + 0.1 * i for i in range(8)],
        "long": [2.0 + 0.5 * i for i in range(8)],
    }
    scaling = {
        "rope_type": "longrope", "short_factor": factors["short"], "long_factor": factors["long"],
        "original_max_position_embeddings": 64, "factor": 8.0, "rope_theta": 10000.0,
    }  # fmt: skip
    monkeypatch.setitem(FAMILIES, "phi3", {**MORE["phi3"], "original_max_position_embeddings": 64})
    folder = make_model("phi3", tmp_path / "checkpoint", rope_parameters=scaling)

    class WithFactors(gguf.GGUFWriter):
        def write_header_to_file(self, *args: Any) -> None:
            for name, values in factors.items():
                self.add_tensor(f"rope_factors_{name}.weight", np.array(values, dtype=np.float32))
            self.add_rope_scaling_orig_ctx_len(64)
            self.add_rope_scaling_attn_factors((1 + np.log(8.0) / np.log(64)) ** 0.5)
            super().write_header_to_file(*args)

    monkeypatch.setattr("tests.engine.gguf.files.gguf.GGUFWriter", WithFactors)
    file = write_gguf(folder, tmp_path / "model.gguf", everywhere(Kind.F32), "phi3")
    for length in (128, 48):
        settings = {"num_gpu_blocks_override": 200, "max_model_len": length}
        got, expected = (tokens(LLM(str(path), **settings)) for path in (file, folder))
        assert got == expected


def test_llama_3_scales_its_rotation(tmp_path: Path) -> None:
    """The file holds the factors of `llama3` scaling as a tensor."""
    import gguf

    folder = make_model("llama", tmp_path / "checkpoint")
    scaled = json.loads((folder / "config.json").read_text())
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128, "rope_theta": 10000.0,
    }  # fmt: skip
    scaled["rope_parameters"] = scaling
    (folder / "config.json").write_text(json.dumps(scaled))
    from engine.models.rotary_embedding import _inverse_frequencies, _llama3, rope_spec

    spec = rope_spec(scaled, 16)
    factors = _inverse_frequencies(10000.0, 16) / _llama3(spec, 128)[0]

    class WithFactors(gguf.GGUFWriter):
        def write_header_to_file(self, *args: Any) -> None:
            self.add_tensor("rope_freqs.weight", factors.numpy())
            super().write_header_to_file(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.engine.gguf.files.gguf.GGUFWriter", WithFactors)
        file = write_gguf(folder, tmp_path / "model.gguf", everywhere(Kind.F32))
    assert tokens(make(file)) == tokens(make(folder))
