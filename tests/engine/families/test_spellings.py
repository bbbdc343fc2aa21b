"""An architecture under another spelling of its checkpoints is the same model."""

from __future__ import annotations

import json
from pathlib import Path

from engine import LLM, SamplingParams
from tests.survey.recipes import RECIPES
from tests.survey.tiny import make_checkpoint


def test_mpt_as_its_own_code_spells_it(tmp_path: Path) -> None:
    recipe = next(recipe for recipe in RECIPES.values() if recipe["model_type"] == "mpt")
    make_checkpoint(recipe, tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", num_gpu_blocks_override=64)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = llm.generate("the quick brown", params)[0].outputs[0].token_ids
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {
        "architectures": ["MPTForCausalLM"],
        "logit_scale": None,
        "auto_map": {"AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"},
    }
    path.write_text(json.dumps(config))
    llm = LLM(str(tmp_path), dtype="float32", num_gpu_blocks_override=64)
    assert llm.generate("the quick brown", params)[0].outputs[0].token_ids == expected
