"""A checkpoint's own layer for drafts says what its equation says, and changes nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from engine import LLM
from engine.checkpoints.safetensors import WeightReader
from engine.contract.errors import ConfigError, ModelLoadError
from tests.engine.speculative.mtp_folders import (
    PREFIX,
    configure,
    glm_with_drafts,
    mtp_equation,
    right_glm,
    save,
    with_drafts,
)
from tests.engine.speculative.test_eagle import BIAS, BIASED, Watch
from tests.engine.speculative.test_equality import MIXED, make, prompts, run, texts
from tests.survey.bridged import BRIDGED
from tests.survey.recipes import RECIPES
from tests.survey.tiny import Oracle, make_checkpoint

pytestmark = pytest.mark.usefixtures("always_drafts")


def drafting(folder: Path, **settings: Any) -> LLM:
    config = {"method": "mtp", "num_speculative_tokens": 4}
    return make(folder, speculative_config=config, **settings)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return glm_with_drafts(tmp_path_factory.mktemp("glm"))


def watched(llm: LLM, folder: Path) -> Watch:
    oracle = Oracle(folder).model
    return Watch(llm, mtp_equation(folder, oracle), oracle, BIAS)


@pytest.mark.parametrize(
    ("recipe", "kernels"), [("glm4_moe", True), ("glm4_moe", False), ("deepseek_v3", True)]
)
def test_drafts_are_the_equations_whatever_was_cached_cut_or_accepted(
    recipe: str, kernels: bool, tmp_path: Path
) -> None:
    """Four of them with one layer, which has tables of its own."""
    folder = with_drafts(recipe, tmp_path, tables=True)
    llm = drafting(
        folder, block_size=4, cpu_kernels=kernels, max_num_batched_tokens=24, max_num_seqs=6
    )
    watch = watched(llm, folder)
    common = list(range(4, 60))
    asked = [[5, 6, 7], [8], common[:48], [*common, 9], [*common, 9, 9, 8], common[:16]]
    if not kernels:  # plain torch runs experts one by one: a tenth of it is enough
        asked = [[5, 6, 7], common[:16], [*common[:16], 9]]
    for _ in range(2 if kernels else 1):
        llm.generate(asked, BIASED, use_tqdm=False)
    stats = llm.core.snapshot()
    assert len(watch.depths) > (30 if kernels else 10)
    assert not watch.mismatched_lengths
    assert max(watch.depths) == 4
    assert stats.prefix_cache_hits_total > 100 or not kernels
    accepted = stats.spec_decode_num_accepted_tokens_total
    assert 10 < accepted < stats.spec_decode_num_draft_tokens_total
    llm.core.check_integrity()


@pytest.mark.parametrize("recipe", ["glm4_moe_lite", "deepseek_v32"])
def test_drafts_by_the_layers_of_other_families_change_no_text(recipe: str, tmp_path: Path) -> None:
    """One names its layers by kind, the other's choose the tokens that they attend to."""
    folder = with_drafts(recipe, tmp_path)
    asked = [list(range(4, 40)), [9] * 7]
    llm = drafting(folder)
    drafted = llm.generate(asked, MIXED["greedy"], use_tqdm=False)
    assert texts(drafted) == texts(make(folder).generate(asked, MIXED["greedy"], use_tqdm=False))
    assert llm.core.stats.spec_decode_num_draft_tokens_total > 0


def test_every_way_of_choosing_gives_the_same(glm: Path) -> None:
    asked = prompts(random.Random(5))
    baseline = run(make(glm), asked)
    llm = drafting(glm)
    for turn in range(2):  # cold, then from the prefix cache
        drafted = run(llm, asked)
        assert texts(drafted) == texts(baseline), turn
        for was, now in zip(baseline, drafted, strict=True):
            assert [completion.logprobs for completion in was.outputs] == [
                completion.logprobs for completion in now.outputs
            ]
    assert llm.core.stats.spec_decode_num_draft_tokens_total > 200


def test_a_layer_that_is_right_takes_the_model_ahead(tmp_path: Path) -> None:
    folder = right_glm(tmp_path)
    llm = drafting(folder)
    asked = [list(range(4, 40)), [9] * 7]
    params = MIXED["greedy"]
    drafted = llm.generate(asked, params, use_tqdm=False)
    assert texts(drafted) == texts(make(folder).generate(asked, params, use_tqdm=False))
    stats = llm.core.stats
    accepted = stats.spec_decode_num_accepted_tokens_total
    assert accepted > 0.35 * stats.spec_decode_num_draft_tokens_total > 10


def test_copies_of_the_models_tables_are_shared_and_others_arent(glm: Path, tmp_path: Path) -> None:
    sizes = {}
    for kind, folder in (("copies", glm), ("own", glm_with_drafts(tmp_path, tables=True))):
        heads = drafting(folder).core.executor.drafts.of_heads._heads
        sizes[kind] = heads.nbytes
    tables = 2 * load_file(glm / "model.safetensors")["lm_head.weight"].nbytes
    assert sizes["own"] - sizes["copies"] >= tables


def test_nobody_reads_the_layer_who_does_not_draft_with_it(
    glm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read: list[str] = []
    for name in ("get", "stored", "matrix"):
        inner = getattr(WeightReader, name)

        def noted(self: WeightReader, name: str, *rest: Any, _inner: Any = inner) -> Any:
            read.append(name)
            return _inner(self, name, *rest)

        monkeypatch.setattr(WeightReader, name, noted)
    make(glm)
    assert read
    assert not [name for name in read if name.startswith(PREFIX)]
    assert "weren't used" not in caplog.text
    drafting(glm)
    assert f"{PREFIX}eh_proj.weight" in read


def test_the_layer_is_rounded_as_the_model_is(glm: Path) -> None:
    sizes = [
        drafting(glm, quantization=quantization).core.executor.drafts.of_heads._heads.nbytes
        for quantization in (None, "int8")
    ]
    assert sizes[1] < 0.5 * sizes[0]


def test_it_sleeps_with_the_model(glm: Path) -> None:
    llm = drafting(glm, enable_sleep_mode=True)
    initial_outputs = llm.generate([list(range(4, 60))], BIASED, use_tqdm=False)
    llm.sleep(2)
    assert llm.core.executor.drafts.of_heads._heads is None
    llm.wake_up()
    watch = watched(llm, glm)
    assert texts(llm.generate([list(range(4, 60))], BIASED, use_tqdm=False)) == texts(
        initial_outputs
    )
    assert sum(watch.depths) > 20
    assert not watch.mismatched_lengths


def test_the_layer_may_be_in_another_folder(glm: Path, tmp_path: Path) -> None:
    """Where who rounded a checkpoint left it out."""
    folder = glm_with_drafts(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save(folder, {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)})
    llm = make(folder, speculative_config={"method": "glm4_moe_mtp", "model": str(glm)})
    llm.generate([[5, 6, 7]], BIASED, use_tqdm=False)
    assert llm.core.stats.spec_decode_num_draft_tokens_total > 0
    with pytest.raises(ModelLoadError, match="layers for drafts were left out"):
        drafting(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_nextn_predict_layers": 0}, "no layers for drafts .num_nextn_predict_layers"),
        ({"num_nextn_predict_layers": None}, "no layers for drafts"),
        ({"num_nextn_predict_layers": 2}, "has 2 layers for drafts"),
        ({"num_nextn_predict_layers": "1"}, "must be a whole number"),
    ],
)
def test_a_checkpoint_without_such_a_layer_is_refused_by_name(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = glm_with_drafts(tmp_path)
    configure(folder, **changes)
    with pytest.raises(ModelLoadError, match=says):
        drafting(folder)


def test_a_family_without_them_is_refused_by_name(tmp_path: Path) -> None:
    make_checkpoint(RECIPES["llama"], tmp_path / "llama")
    with pytest.raises(ModelLoadError, match="no layers for drafts are known of LlamaForCausalLM"):
        drafting(tmp_path / "llama")
    make_checkpoint(BRIDGED["arcee"], tmp_path / "arcee")
    with pytest.raises(ConfigError, match="needs a model that runs on Quire's own decoder"):
        drafting(tmp_path / "arcee")
