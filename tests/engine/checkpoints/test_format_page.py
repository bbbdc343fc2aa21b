"""The checkpoint format of docs/extending.md, followed to the letter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import LLM
from engine.contract.errors import ModelLoadError
from engine.models import registry as plugins
from engine.quantization.formats import registry
from tests.engine.checkpoints.folders import make_pair
from tests.engine.checkpoints.test_formats import GREEDY, PROMPT
from tests.engine.checkpoints.writers import Written
from tests.engine.models import Oracle
from tests.engine.pages import install


def stairs(weight: Tensor) -> Written:
    groups = weight.unflatten(1, (-1, 32))
    steps = (groups.abs().amax(-1) / 7).half()
    values = (groups / steps.float()[..., None]).round().clamp(-8, 7) + 8
    flat = values.flatten(1).to(torch.uint8)
    stands_for = ((values - 8) * steps.float()[..., None]).flatten(1)
    return {"codes": flat[:, ::2] | flat[:, 1::2] << 4, "steps": steps}, stands_for


def test_the_format_of_the_page_is_read_and_kept(
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiler: None,
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(registry, "FORMATS", dict(registry.FORMATS))
    monkeypatch.setattr(plugins, "_loaded", set())
    monkeypatch.setenv("QUIRE_PLUGINS", "stairs")
    monkeypatch.syspath_prepend(str(site))
    install("A checkpoint format", "quire_stairs", site)
    config = {"quant_method": "stairs", "rise": 8}
    pair = make_pair(model_folder("llama"), tmp_path / "pair", config, stairs)
    settings = {"dtype": "float32", "num_gpu_blocks_override": 20, "max_model_len": 64}
    try:
        baseline_llm = LLM(str(pair.packed), cpu_kernels=False, **settings)
        token_ids = baseline_llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        assert list(token_ids) == Oracle(pair.dense).greedy(PROMPT, 6)
        reports = LLM(str(pair.packed), **settings).load_report()
        layers = [report for report in reports if report.format == "stairs int4 g32"]
        assert len(layers) == 12
        assert {report.level for report in layers} == {"kept"}
        with pytest.raises(ModelLoadError, match="rise is 99"):
            LLM(str(pair.packed), hf_overrides={"quantization_config": {**config, "rise": 99}})
    finally:
        sys.modules.pop("quire_stairs", None)
