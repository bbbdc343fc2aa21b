"""Adapters of experts: PEFT's tokens for each family, and all layouts that adapters have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine import LoRARequest
from engine.contract.errors import InvalidRequest
from engine.contract.lora import CONFIG_FILE, WEIGHTS_FILE
from engine.lora.adapter import LoRALayer
from engine.lora.check import check_adapter
from engine.lora.layer_delta import LayerDeltaBuilder
from engine.lora.reader import read_adapter
from engine.lora.target_modules import TargetModules
from engine.models.registry import decoder_spec, read_config
from engine.models.supports_lora import LinearSizes

from .adapters import write_adapter
from .peft_oracle import checkpoint, make_adapter, save
from .test_peft_equality import check, generate, serve

STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SHARED = [f"shared_expert.{name}_proj" for name in ("gate", "up", "down")]
#: recipe -> PEFT's options.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"target_modules": ["q_proj"], "target_parameters": STACKS},
    "qwen3_moe": {
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": [*STACKS, "mlp.gate.weight"],
        "rank_pattern": {"mlp.experts.down_proj": 3},
        "alpha_pattern": {"mlp.experts.gate_up_proj": 5},
    },
    "qwen2_moe": {
        "target_modules": [*SHARED, "shared_expert_gate"],
        "target_parameters": STACKS,
        "use_rslora": True,
        "lora_alpha": 4,
    },
    "gpt_oss": {
        "target_modules": ["q_proj"],
        "target_parameters": [*STACKS, "mlp.router.weight"],
    },
    "granitemoe": {
        "target_modules": ["q_proj"],
        "target_parameters": [name.replace("mlp.", "block_sparse_moe.") for name in STACKS],
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_peft(tmp_path: Path, family: str) -> None:
    model = checkpoint(family, tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "adapter", **FAMILIES[family])
    check(model, adapter)
    verdict = check_adapter(str(model), adapter, probe=True)
    assert verdict.error is None
    assert verdict.probe is not None
    assert verdict.probe.max_difference < 1e-4


def test_expert_by_expert_they_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint("qwen2_moe", tmp_path / "model")
    options = FAMILIES["qwen2_moe"]
    targets = [*options["target_modules"], "q_proj"]
    adapter = make_adapter(model, tmp_path / "adapter", **{**options, "target_modules": targets})
    monkeypatch.setattr("engine.models.decoder.compile_decoder", lambda *args: None)
    check(model, adapter)
    check(model, adapter, cpu_kernels=False)


Files = tuple[dict[str, Any], dict[str, Tensor]]


@pytest.fixture(scope="module")
def experts_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetModules, Path]:
    folder = tmp_path_factory.mktemp("experts")
    model = checkpoint("mixtral", folder / "model")
    adapter = make_adapter(
        model, folder / "adapter", target_modules=[], target_parameters=STACKS, r=4
    )
    return TargetModules(decoder_spec(read_config(model))), adapter


def files(folder: Path) -> Files:
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    return config, load_file(folder / WEIGHTS_FILE)


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each expert's own matrices by the names of a Mixtral whose experts are modules."""
    copies = {}
    for name, a in tensors.items():
        if "lora_A" not in name:
            continue
        b = tensors[name.replace("lora_A", "lora_B")]
        prefix = name.removesuffix(".lora_A.weight").removesuffix(".base_layer")
        prefix = prefix.replace(".mlp.", ".block_sparse_moe.")
        half = len(b) // 2
        words = {"w1": slice(0, half), "w3": slice(half, None)}
        if a.shape[1] != 64:  # not of the hidden size
            words = {"w2": slice(None)}
        for expert in range(4):
            for word, rows in words.items():
                key = f"{prefix}.{expert}.{word}.lora"
                copies[f"{key}_A.weight"] = a[4 * expert : 4 * expert + 4].clone()
                copies[f"{key}_B.weight"] = b.view(len(b), 4, 4)[rows, :, expert].clone()
    return copies


def old_order(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As PEFT had them at first: A of a weight's outputs, B of its inputs."""
    copies = {}
    for name, a in tensors.items():
        if "lora_A" in name:
            other = name.replace("lora_A", "lora_B")
            b = tensors[other]
            by_expert = b.view(len(b), 4, 4)  # outputs, rank, experts
            copies[name] = by_expert.permute(2, 1, 0).reshape(16, -1).clone()
            copies[other] = a.view(4, 4, -1).permute(2, 1, 0).reshape(-1, 16).clone()
    return copies


@pytest.mark.parametrize("layout", [one_by_one, old_order])
def test_other_layouts_are_the_same_adapter(
    experts_model: tuple[TargetModules, Path],
    tmp_path: Path,
    layout: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> None:
    modules, folder = experts_model
    config, tensors = files(folder)
    baseline_modules = read_adapter(folder, modules).modules
    other = read_adapter(write_adapter(tmp_path / "x", config, layout(tensors)), modules).modules
    assert baseline_modules.keys() == other.keys()
    assert len(baseline_modules) == 2 * 4 * 3  # layers, experts, projections
    for name, delta in baseline_modules.items():
        assert delta.a is not None
        assert delta.b is not None
        assert torch.equal(delta.a, other[name].a)
        assert torch.equal(delta.b, other[name].b)
        assert delta.scale == other[name].scale


def _misstated_rank(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["r"] = 8


def _half_an_expert_less(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor[:14] if "lora_A" in name else tensor[:, :14]


def _no_partner(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del tensors[next(name for name in tensors if "lora_A" in name)]


def _other_width(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if "lora_A" in name]:
        tensors[name] = tensors[name][:, :7]


def _twice(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[name.replace("experts", "experts.base_layer.base_layer")] = tensors[name].clone()


def _bias_of_b(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name.replace(".weight", ".bias")] = torch.zeros(len(tensors[name]))


def _magnitude(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    name = next(name for name in tensors if "lora_B" in name)
    prefix = name.removesuffix(".lora_B.weight")
    tensors[f"{prefix}.lora_magnitude_vector.weight"] = torch.ones(len(tensors[name]))


def _bias_of_one(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    local_tensors = one_by_one(tensors)
    name = next(name for name in local_tensors if "w2.lora_B" in name)
    local_tensors[name.replace(".weight", ".bias")] = torch.ones(len(local_tensors[name]))
    tensors.clear()
    tensors |= local_tensors


def _nan(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    next(iter(tensors.values()))[0, 0] = float("nan")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_misstated_rank, r"is of rank 4, but it must be 8"),
        (_half_an_expert_less, r"they must be \[4 \* rank, inputs\]"),
        (_no_partner, "has no partner"),
        (_other_width, "but the experts map"),
        (_twice, "changes what another tensor changes too"),
        (_nan, "holds NaN"),
        (_bias_of_b, "isn't supported for a module of this kind"),
        (_magnitude, "isn't supported for a module of this kind"),
        (_bias_of_one, "isn't supported for a module of this kind"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    experts_model: tuple[TargetModules, Path],
    tmp_path: Path,
    spoil: Callable[..., None],
    words: str,
) -> None:
    modules, folder = experts_model
    config, tensors = files(folder)
    spoil(config, tensors)
    spoilt = write_adapter(tmp_path / "adapter", config, tensors)
    with pytest.raises(InvalidRequest, match=words) as refused:
        read_adapter(spoilt, modules)
    assert "experts" in (refused.value.param or "")


class Experts(torch.nn.Module):
    """The experts of a Mixtral as modules of their own, which PEFT adapts with DoRA."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        for name, both in weights.items():
            if "gate_up_proj" not in name:
                continue
            down = weights[name.replace("gate_up_proj", "down_proj")]
            prefix = name.removesuffix(".gate_up_proj").replace(".mlp.", ".block_sparse_moe.")
            for expert in range(len(both)):
                gate, up = both[expert].chunk(2)
                for word, weight in {"w1": gate, "w3": up, "w2": down[expert]}.items():
                    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                    linear.weight.data = weight.clone()
                    self._store(f"{prefix}.{expert}.{word}", linear)

    def _store(self, name: str, linear: torch.nn.Module) -> None:
        module: torch.nn.Module = self
        *path, last = name.split(".")
        for word in path:
            if not hasattr(module, word):
                module.add_module(word, torch.nn.Module())
            module = getattr(module, word)
        module.add_module(last, linear)

    def stacked(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights by the names of `transformers` again."""
        stacked = dict(weights)
        parameters = dict(self.named_parameters())
        for name in weights:
            for words in (("w1", "w3"), ("w2",)):
                last = "gate_up_proj" if len(words) == 2 else "down_proj"
                if not name.endswith(f"experts.{last}"):
                    continue
                prefix = name.removesuffix(f".{last}").replace(".mlp.", ".block_sparse_moe.")
                stacked[name] = torch.stack(
                    [
                        torch.cat(
                            [parameters[f"{prefix}.{expert}.{word}.weight"] for word in words]
                        )
                        for expert in range(len(weights[name]))
                    ]
                )
        return stacked


def test_dora_of_experts_that_are_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = checkpoint("mixtral", tmp_path / "model")
    full = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    weights = {name: parameter.detach() for name, parameter in full.named_parameters()}
    torch.manual_seed(2)
    config = LoraConfig(
        r=4, target_modules=["w1", "w2", "w3"], use_dora=True, init_lora_weights=False
    )
    adapted = get_peft_model(Experts(weights), config)  # type: ignore[arg-type]
    for name, parameter in adapted.named_parameters():
        if "magnitude" in name:
            parameter.data *= 1 + 0.3 * torch.randn_like(parameter)
    save(adapted, tmp_path / "adapter")
    merged = adapted.merge_and_unload()
    full.load_state_dict(merged.stacked(weights), strict=False)
    prompt = [5, 9, 17, 33, 65]
    tokens = list(prompt)
    for _ in range(12):
        with torch.no_grad():
            tokens.append(int(full(torch.tensor([tokens])).logits[0, -1].argmax()))
    prompt_requests = [(prompt, LoRARequest("a", 1, str(tmp_path / "adapter"))), (prompt, None)]
    got, base = generate(serve(model), prompt_requests, 12)
    assert got == tokens[len(prompt) :] != base
    assert check_adapter(str(model), tmp_path / "adapter", probe=True).error is None
    monkeypatch.setattr("engine.models.decoder.compile_decoder", lambda *args: None)
    assert generate(serve(model), prompt_requests, 12) == [got, base]


def test_dora_of_stacked_experts_is_refused(
    experts_model: tuple[TargetModules, Path], tmp_path: Path
) -> None:
    modules, folder = experts_model
    config, tensors = files(folder)
    spoilt = write_adapter(tmp_path / "adapter", {**config, "use_dora": True}, tensors)
    with pytest.raises(InvalidRequest, match="DoRA of experts that are one tensor") as refused:
        read_adapter(spoilt, modules)
    assert refused.value.param == "use_dora"


@pytest.mark.parametrize("more", ["magnitude", "bias"])
def test_experts_in_one_tensor_take_matrices_alone(more: str) -> None:
    """Anything more depends on weights that such an expert can't be asked for."""
    parts = LayerDeltaBuilder(cast(Any, None), LinearSizes(8, 16), has_bias=True)
    delta = LoRALayer(a=torch.ones(2, 8), b=torch.ones(16, 2))
    parts.add(0, 16, delta, None)
    setattr(delta, more, torch.ones(16))
    model = cast(Any, SimpleNamespace(ops=SimpleNamespace(device="cpu")))
    with pytest.raises(
        InvalidRequest, match="of experts and kv_b_proj aren't supported on this device"
    ):
        LayerDeltaBuilder(model, LinearSizes(8, 16), has_bias=True).add(0, 16, delta, None)


@pytest.mark.parametrize("part", ["w1", "v1", "w2"])
def test_the_experts_of_dbrx_are_refused_by_name(tmp_path: Path, part: str) -> None:
    modules = TargetModules(decoder_spec(read_config(checkpoint("dbrx", tmp_path / "model"))))
    prefix = "base_model.model.transformer.blocks.0.ffn.experts.mlp"
    for name in (f"{prefix}.lora_A.weight", f"{prefix}.{part}.lora_A.weight"):
        tensors = {name: torch.ones(8, 64), name.replace("_A", "_B"): torch.ones(64, 8)}
        folder = write_adapter(tmp_path / "adapter", {"peft_type": "LORA", "r": 8}, tensors)
        with pytest.raises(InvalidRequest, match="belongs to no module of this model") as refused:
            read_adapter(folder, modules)
        assert refused.value.param in tensors


def test_peft_cannot_run_what_it_makes_of_the_experts_of_dbrx(tmp_path: Path) -> None:
    """So there is nothing to be equal to, and nobody has trained such an adapter."""
    from peft import LoraConfig, get_peft_model

    model = checkpoint("dbrx", tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    parameters = [f"experts.mlp.{part}" for part in ("w1", "v1", "w2")]
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=[], target_parameters=parameters)
    adapted: Any = get_peft_model(base, config)
    with pytest.raises(AttributeError, match="v1"):
        adapted(torch.tensor([[5, 9]]))


def test_a_rank_above_the_bound_is_refused(experts_model: tuple[TargetModules, Path]) -> None:
    modules, folder = experts_model
    with pytest.raises(InvalidRequest, match=r"rank 4 is over max_lora_rank \(2\)"):
        read_adapter(folder, modules, 2)
