"""The table of what each optimisation brings: two engines in processes of their own, in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import (
    LOADS,
    PARTS,
    Facts,
    Part,
    Row,
    Sizes,
    Worker,
    WorkerFailed,
    chosen,
    compare,
)
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.core.engine_core import EngineCore
from kernels.ablations import NAMES, VARIABLE
from kernels.cpu import CpuKernels, CpuKernelsUnavailable

Folder = Callable[[str], Path]
SMALL = Sizes(prompts=2, output_len=3, context=24)


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    """Without one there is nothing to turn off."""
    try:
        CpuKernels()
    except CpuKernelsUnavailable as error:
        pytest.skip(str(error))


def settings(folder: Path, **others: Any) -> dict[str, Any]:
    return {
        "model": str(folder),
        "num_gpu_blocks_override": 200,
        "num_threads": 1,
        "skip_tokenizer_init": True,
        **others,
    }


@pytest.mark.system
def test_every_switch_of_the_kernels_has_a_part() -> None:
    named = {key: part.environment.get(VARIABLE) for key, part in PARTS.items()}
    of_the_gpu = {"split-batches"}
    assert {name for name in named.values() if name} == set(NAMES) - of_the_gpu
    assert all(name in (None, key) for key, name in named.items())
    variables = {name for part in PARTS.values() for name in part.environment}
    assert variables == {VARIABLE, "QUIRE_CPU_ISA"}


def test_every_part_names_settings_and_loads_that_there_are() -> None:
    for part in PARTS.values():
        assert part.loads
        assert set(part.loads) <= set(LOADS)
        assert part.without or part.environment
        EngineConfig.from_mapping({**part.with_})
        EngineConfig.from_mapping({**part.without})


@pytest.mark.parametrize("name", LOADS)
def test_each_load_gives_a_figure(
    name: str, model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.compare._REST_S", 0.0)
    core = EngineCore(EngineConfig(**settings(model_folder("llama"))))
    load = LOADS[name]
    assert load.run(core, SMALL, 1) > 0
    assert not core.has_work
    assert load.gain(2.0, 1.0) == (0.5 if load.less_is_better else 2.0)


@pytest.mark.system
def test_a_part_is_compared_in_turns(model_folder: Folder) -> None:
    """What can't be compared says why, and the others go on."""
    wrong = Part("", "", ("one",), environment={VARIABLE: "maybe"})
    parts = {"decoder": PARTS["decoder"], "experts": PARTS["experts"], "wrong": wrong}
    compared, skipped, refused = compare(parts, settings(model_folder("llama")), SMALL, 2)
    assert (compared.part, compared.load, compared.skipped) == ("decoder", "one", "")
    assert len(compared.gains) == 2
    figures = compared.figures("QUIRE_ABLATIONS=decoder")
    assert figures["gain_low"] <= figures["gain"] <= figures["gain_high"]
    assert figures["with"] > 0
    assert figures["without"] > 0
    assert skipped.figures("x") == {
        "benchmark": "ablation",
        "part": "experts",
        "switch": "x",
        "skipped": "the model has no experts",
    }
    # Variables reach only the engine without the part, where this one's value is refused.
    assert refused.skipped.startswith("QUIRE_ABLATIONS has no 'maybe'; there are prefetch, ")


@pytest.mark.system
def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="nowhere"):
        next(compare(PARTS, settings(tmp_path / "nowhere"), SMALL, 1))


@pytest.mark.system
def test_an_engine_that_dies_says_its_last_words(model_folder: Folder) -> None:
    worker = Worker(settings(model_folder("llama")), SMALL)
    with worker, pytest.raises(WorkerFailed, match="KeyError: 'nonsense'"):
        worker.figure("nonsense", 1)


def test_gains_are_the_medians_of_turns() -> None:
    row = Row("p", "one", 20.0, 10.0, (2.0, 1.5, 4.0))
    figures = row.figures("s")
    assert (figures["gain"], figures["gain_low"], figures["gain_high"]) == (2.0, 1.5, 4.0)
    assert (figures["turns"], figures["unit"]) == (3, "tok/s")


@pytest.mark.parametrize(
    ("name", "facts", "reason"),
    [
        ("avx512", Facts("cpu-avx2", "float32", None, False), "nothing wider"),
        ("rounding", Facts("cpu-avx512", "float32", None, False), "aren't bfloat16"),
        ("rounding", Facts("cpu-avx2", "bfloat16", None, False), "never round"),
        ("vnni-bf16", Facts("cpu-avx512", "float32", None, False), "neither"),
        ("prefetch", Facts("reference", "float32", None, False), "reference kernels"),
    ],
)
def test_what_cannot_be_shown_says_why(name: str, facts: Facts, reason: str) -> None:
    assert reason in PARTS[name].refuses(facts)


def test_parts_are_chosen_by_name() -> None:
    assert list(chosen("int8, decoder")) == ["int8", "decoder"]
    assert chosen(None) == PARTS
    assert chosen("int8,split-kv", "one") == {"int8": replace(PARTS["int8"], loads=("one",))}
    with pytest.raises(ConfigError, match="There is no load 'some'; there are one, "):
        chosen(None, "some")
    with pytest.raises(ConfigError, match="There is no part 'nonsense'; there are kernels, "):
        chosen("int8,nonsense")
