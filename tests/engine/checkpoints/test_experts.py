"""Experts of every form that is kept say what `transformers` says with the same rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine import LLM
from tests.engine.checkpoints.folders import Pair, make_mxfp4, make_pair
from tests.engine.checkpoints.rounded import RoundedLinear, RoundedModel, Rounding, logits_of
from tests.engine.checkpoints.test_formats import FORMATS, NEAR, SMALL, far
from tests.engine.checkpoints.test_models import split_experts
from tests.survey.recipes import RECIPES
from tests.survey.tiny import make_checkpoint

#: Of each way to keep integers, floats and tables; those of gpt-oss have tensors of their own.
METHODS = [
    "gptq-4", "gptq-4-zeros", "gptq-4-sorted", "gptq-8", "gptq-8-zeros", "awq", "awq-8", "fp8-row",
    "fp8-block", "nvfp4", "hqq-4", "hqq-8", "bnb-nf4", "bnb-nested", "bnb-int8", "ct-w4a16",
    "ct-w8a8", "ct-w8-zeros", "ct-fp8-row", "ct-mxfp4",
]  # fmt: skip
#: By plain torch one of each way: how each form is read into it, test_formats.py tells.
READ = ["gptq-4-sorted", "fp8-block", "nvfp4", "hqq-4", "bnb-nested", "ct-w8-zeros"]
CASES = [
    *((name, True) for name in METHODS),
    *(
        pytest.param(name, False, marks=() if name in READ else pytest.mark.slow)
        for name in METHODS
    ),
]  # fmt: skip
Expert = Callable[[Tensor], Tensor]


class RoundedExperts(nn.Module):
    """What is chosen of them runs on its own rows, as in `transformers`."""

    def __init__(self, experts: Sequence[Expert]) -> None:
        super().__init__()
        self._experts = experts

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self._experts):
            rows, choice = torch.where(chosen == number)
            if len(rows):
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, choice, None])
        return out


class RoundedMixtral(RoundedModel):
    """Whose experts have tensors of their own: w1 is the gate, w3 is up, w2 is down."""

    def _install(self, model: nn.Module, layers: Mapping[str, RoundedLinear]) -> None:
        positions = sorted({name.rpartition(".experts.")[0] for name in layers})
        assert positions
        for position in positions:
            count = sum(name.startswith(f"{position}.") for name in layers) // 3
            experts = [_expert(layers, f"{position}.experts.{number}") for number in range(count)]
            target_name = position.replace("block_sparse_moe", "mlp")
            model.set_submodule(f"{target_name}.experts", RoundedExperts(experts))


def _expert(layers: Mapping[str, RoundedLinear], prefix: str) -> Expert:
    gate, up, down = (layers[f"{prefix}.{name}"] for name in ("w1", "w3", "w2"))
    return lambda x: down(nn.functional.silu(gate(x)) * up(x))


class RoundedGptOss(RoundedModel):
    """Whose experts lie in one tensor, [E, inputs, outputs] where they aren't packed."""

    def _install(self, model: nn.Module, layers: Mapping[str, RoundedLinear]) -> None:
        for module_name in sorted({name.rpartition(".")[0] for name in layers}):
            theirs = model.get_submodule(module_name)
            up, down = (layers[f"{module_name}.{name}"] for name in ("gate_up_proj", "down_proj"))
            experts = [_gpt_oss(theirs, up, down, number) for number in range(len(up.weight))]
            model.set_submodule(module_name, RoundedExperts(experts))


def _gpt_oss(theirs: nn.Module, up: RoundedLinear, down: RoundedLinear, number: int) -> Expert:
    def one(layer: RoundedLinear, name: str) -> Expert:
        bias = theirs.get_parameter(f"{name}_bias")[number]
        return lambda x: layer.inputs(x) @ layer.weight[number] + bias

    initial, after = one(up, "gate_up_proj"), one(down, "down_proj")
    gated: Expert = theirs._apply_gate  # type: ignore[assignment]
    return lambda x: after(gated(initial(x)))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral") / "made"
    make_checkpoint({**RECIPES["mixtral"], "intermediate_size": 64}, folder)
    split_experts(folder)
    return folder


def same_logits(pair: Pair, model: RoundedModel, compiled: bool) -> LLM:
    """A loaded model that says, of a prompt without edges, what the rounded one says."""
    llm = LLM(str(pair.packed), cpu_kernels=compiled, **SMALL)
    prompt = model.clear_prompt(5, 3)
    tokens, logits = logits_of(llm, prompt, 3)
    output, expected = model.greedy(prompt, 3)
    assert tokens == output
    assert far(logits, expected) < NEAR
    return llm


@pytest.mark.parametrize(("name", "compiled"), CASES)
def test_experts_are_rounded_as_their_format_says_and_no_further(
    name: str, compiled: bool, mixtral: Path, tmp_path: Path, compiler: None
) -> None:
    form = FORMATS[name]

    def chosen(of: str) -> bool:
        return ".experts." in of and of.endswith(".weight")

    pair = make_pair(mixtral, tmp_path, form.config, form.write, chosen)
    llm = same_logits(pair, RoundedMixtral(pair, form.rounding, inputs=compiled), compiled)
    experts = [report for report in llm.load_report() if ".experts." in report.layer]
    assert experts
    assert not compiled or {report.level for report in experts} == {"kept"}


@pytest.mark.parametrize("compiled", [True, False])
def test_the_experts_of_gpt_oss_are_rounded_as_mxfp4_says(
    compiled: bool, tmp_path: Path, compiler: None
) -> None:
    make_checkpoint(RECIPES["gpt_oss"], tmp_path / "made")
    pair = make_mxfp4(tmp_path / "made", tmp_path)
    llm = same_logits(pair, RoundedGptOss(pair, Rounding(), inputs=compiled), compiled)
    experts = [report for report in llm.load_report() if report.format == "mxfp4"]
    assert experts
    assert not compiled or {report.level for report in experts} == {"kept"}
