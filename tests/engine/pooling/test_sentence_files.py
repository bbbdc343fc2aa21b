"""What sentence-transformers' files say is what happens; what they can't say is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM, PoolingParams
from engine.contract.errors import ConfigError, InvalidRequest, ModelLoadError
from tests.engine.pooling.models import TEXTS, change_config, make, write, write_sentence_files


def st(kind: str, folder: Path, **options: Any) -> Any:
    """One of sentence-transformers' models; it is imported here, for that takes seconds in each
    process that collects tests.
    """
    import sentence_transformers

    of_kind = getattr(sentence_transformers, kind)
    return of_kind(str(folder), device="cpu", local_files_only=True, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make("bert", tmp_path / "m")


def both(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """(ours, sentence-transformers') of `TEXTS`."""
    ours = [out.outputs.embedding for out in LLM(str(folder)).embed(TEXTS, use_tqdm=False)]
    oracle = st("SentenceTransformer", folder)
    return np.array(ours), oracle.encode(TEXTS)


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_and_normalization(folder: Path, pooling: str, normalize: bool) -> None:
    write_sentence_files(folder, pooling, normalize=normalize)
    ours, theirs = both(folder)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_dense_layer(folder: Path) -> None:
    write_sentence_files(folder, dense=12)
    ours, theirs = both(folder)
    assert ours.shape == (len(TEXTS), 12)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_the_default_prompt_comes_first(folder: Path) -> None:
    write_sentence_files(
        folder, prompts={"query": "the lazy dog ", "none": ""}, default_prompt_name="query"
    )
    ours, theirs = both(folder)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_the_longest_text_is_theirs(folder: Path) -> None:
    write_sentence_files(folder)
    write(folder / "sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": False})
    llm = LLM(str(folder))
    assert llm.core.executor.worker.loaded.max_model_len == 20
    assert LLM(str(folder), max_model_len=100).core.executor.worker.loaded.max_model_len == 100


def test_fault_91_the_longest_text_may_be_the_tokenizers(folder: Path) -> None:
    write_sentence_files(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for length, expected in ((20, 20), (int(1e30), 300), (250, 250), (1000, 300)):
        write(path, {**config, "model_max_length": length})
        assert LLM(str(folder)).core.executor.worker.loaded.max_model_len == expected
    write(folder / "sentence_bert_config.json", {"max_seq_length": 30})
    assert LLM(str(folder)).core.executor.worker.loaded.max_model_len == 30


def test_fault_91_what_changes_vectors_in_other_ways_is_refused(folder: Path) -> None:
    write_sentence_files(folder, dense=12)
    modules = json.loads((folder / "modules.json").read_text())
    write(folder / "modules.json", [*modules[:2], modules[3], modules[2]])
    with pytest.raises(ModelLoadError, match="a Dense layer after Normalize"):
        LLM(str(folder))
    write_sentence_files(folder, truncate_dim=8)
    with pytest.raises(ModelLoadError, match="truncate_dim isn't supported"):
        LLM(str(folder))


def test_similarity_is_theirs(folder: Path) -> None:
    write_sentence_files(folder, normalize=False, similarity_fn_name="euclidean")
    (ours,) = LLM(str(folder)).score(TEXTS[0], TEXTS[1], use_tqdm=False)
    oracle = st("SentenceTransformer", folder)
    expected = oracle.similarity(oracle.encode([TEXTS[0]]), oracle.encode([TEXTS[1]]))
    assert ours.outputs.score == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
    ],
)
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_cross_encoders(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = make(kind, tmp_path / "m", "ForSequenceClassification", num_labels=1)
    change_config(folder, **changes)
    outputs = LLM(str(folder)).score(TEXTS[0], TEXTS[1:], use_tqdm=False)
    oracle = st("CrossEncoder", folder)
    expected = oracle.predict([(TEXTS[0], text) for text in TEXTS[1:]])
    np.testing.assert_allclose([out.outputs.score for out in outputs], expected, atol=1e-5)


@pytest.mark.parametrize("function", [torch.nn.Identity, torch.nn.Sigmoid])
def test_fault_91_a_cross_encoders_activation_is_read_where_it_was_written(
    tmp_path: Path, function: type[torch.nn.Module]
) -> None:
    source = make("bert", tmp_path / "m", "ForSequenceClassification", num_labels=1)
    oracle = st("CrossEncoder", source, activation_fn=function())
    folder = tmp_path / "written"
    oracle.save_pretrained(str(folder))
    outputs = LLM(str(folder)).score(TEXTS[0], TEXTS[1:], use_tqdm=False)
    expected = oracle.predict([(TEXTS[0], text) for text in TEXTS[1:]])
    np.testing.assert_allclose([out.outputs.score for out in outputs], expected, atol=1e-5)


def test_fault_91_pooling_without_the_prompt_is_refused_where_there_are_prompts(
    folder: Path,
) -> None:
    write_sentence_files(folder)
    path = folder / "1_Pooling" / "config.json"
    write(path, {"pooling_mode": "mean", "include_prompt": False})
    LLM(str(folder))
    write_sentence_files(folder, prompts={"query": "the lazy dog "})
    write(path, {"pooling_mode": "mean", "include_prompt": False})
    with pytest.raises(ModelLoadError, match="include_prompt"):
        LLM(str(folder))


def test_a_pair_is_cut_where_it_is_longer(tmp_path: Path) -> None:
    folder = make("bert", tmp_path / "m", "ForSequenceClassification", num_labels=1)
    llm = LLM(str(folder), max_model_len=24)
    params = PoolingParams(truncate_prompt_tokens=-1)
    outputs = llm.score(TEXTS[1], [TEXTS[0], TEXTS[1]], params, use_tqdm=False)
    oracle = st("CrossEncoder", folder, max_length=24)
    expected = oracle.predict([(TEXTS[1], TEXTS[0]), (TEXTS[1], TEXTS[1])])
    np.testing.assert_allclose([out.outputs.score for out in outputs], expected, atol=1e-5)
    assert [len(out.prompt_token_ids) for out in outputs] == [24, 24]


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "single_label_classification"}, "softmax"),
        ({"problem_type": "regression"}, ""),
        ({}, "softmax"),
    ],
)
def test_the_problem_decides_the_activation(
    changes: dict[str, Any], activation: str, tmp_path: Path
) -> None:
    folder = make("bert", tmp_path / "m", "ForSequenceClassification", num_labels=3)
    change_config(folder, id2label={"2": "c", "0": "a", "1": "b"}, **changes)
    llm = LLM(str(folder))
    (logits,) = llm.classify(TEXTS[0], PoolingParams(use_activation=False), use_tqdm=False)
    (output,) = llm.classify(TEXTS[0], use_tqdm=False)
    values = np.array(logits.outputs.probs)
    expected = {
        "sigmoid": 1 / (1 + np.exp(-values)),
        "softmax": np.exp(values) / np.exp(values).sum(),
        "": values,
    }[activation]
    np.testing.assert_allclose(output.outputs.probs, expected, atol=1e-6)
    assert output.outputs.labels == ["a", "b", "c"]


def test_dimensions_are_matryoshkas(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="no Matryoshka") as caught:
        LLM(str(folder)).embed("dog", PoolingParams(dimensions=8), use_tqdm=False)
    assert caught.value.param == "dimensions"
    change_config(folder, matryoshka_dimensions=[8, 16])
    llm = LLM(str(folder))
    with pytest.raises(InvalidRequest, match="one of 8, 16"):
        llm.embed("dog", PoolingParams(dimensions=9), use_tqdm=False)
    (full_output,) = llm.embed("dog", use_tqdm=False)
    (cut,) = llm.embed("dog", PoolingParams(dimensions=8), use_tqdm=False)
    head = np.array(full_output.outputs.embedding[:8])
    np.testing.assert_allclose(cut.outputs.embedding, head / np.linalg.norm(head), atol=1e-6)
    assert (
        LLM(str(folder), pooler_config={"dimensions": 16})
        .embed("dog", use_tqdm=False)[0]
        .outputs.hidden_size
        == 16
    )


def test_is_matryoshka_allows_any_dimension(folder: Path) -> None:
    change_config(folder, is_matryoshka=True)
    llm = LLM(str(folder))
    (cut,) = llm.embed("dog", PoolingParams(dimensions=5), use_tqdm=False)
    assert cut.outputs.hidden_size == 5
    with pytest.raises(InvalidRequest, match="1 to 32"):
        llm.embed("dog", PoolingParams(dimensions=33), use_tqdm=False)


def test_unsupported_modules_are_refused_by_name(folder: Path) -> None:
    write_sentence_files(folder, "max")
    with pytest.raises(ModelLoadError, match="pooling_mode_max_tokens"):
        LLM(str(folder))
    write(folder / "modules.json", [{"path": "", "type": "sentence_transformers.models.CNN"}])
    with pytest.raises(ModelLoadError, match="'CNN'"):
        LLM(str(folder))


def test_fault_40_modules_outside_the_folder(folder: Path) -> None:
    write_sentence_files(folder)
    write(folder / "modules.json", [{"path": "../x", "type": "sentence_transformers.models.Dense"}])
    with pytest.raises(ModelLoadError, match="outside"):
        LLM(str(folder))


@pytest.mark.parametrize(
    "changes",
    [
        {"id2label": {"1": "a"}},
        {"id2label": {"a": "b"}},
        {"num_labels": "many", "id2label": None},
        {"sentence_transformers": {"activation_fn": "other.Thing"}},
    ],
)
def test_a_classifier_with_a_broken_config_is_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = make("bert", tmp_path / "m", "ForSequenceClassification", num_labels=1)
    change_config(folder, **changes)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        LLM(str(folder))


def test_broken_sentence_files_are_refused(folder: Path) -> None:
    write_sentence_files(folder)
    write(folder / "sentence_bert_config.json", {"max_seq_length": "long"})
    with pytest.raises(ModelLoadError, match="max_seq_length"):
        LLM(str(folder))
    (folder / "modules.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"modules\.json"):
        LLM(str(folder))


@pytest.mark.parametrize(
    "config",
    [{"pooling_type": "STEP"}, {"unknown": 1}, {"use_activation": 1}, {"dimensions": 8}],
)
def test_a_wrong_pooler_config_is_refused(folder: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(folder), pooler_config=config)
    assert caught.value.param == "pooler_config"
