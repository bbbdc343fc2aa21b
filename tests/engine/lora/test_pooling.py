"""Vectors, states and labels with an adapter are those of PEFT, of decoders and of encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from engine import LLM, LoRARequest, PoolingParams
from engine.lora.check import check_adapter
from tests.engine.pooling.models import TEXTS, make

from .peft_oracle import checkpoint, make_adapter, prompts, save
from .test_peft_equality import ALL


def test_vectors_are_those_of_peft(tmp_path: Path) -> None:
    from peft import PeftModel  # takes seconds, in each process that collects tests

    folder = checkpoint("qwen2", tmp_path / "model")
    adapter = make_adapter(folder, tmp_path / "adapter", target_modules=ALL)
    llm = LLM(str(folder), dtype="float32", runner="pooling", convert="embed", max_num_seqs=4)
    request, texts = LoRARequest("a", 1, str(adapter)), prompts(5)
    asked = [None, request, request, None, request]
    outputs = llm.embed(
        [{"prompt_token_ids": text} for text in texts], use_tqdm=False, lora_request=asked
    )
    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = [_vector(base, text) for text in texts]
    adapted = PeftModel.from_pretrained(base, adapter).eval()
    for index, adapter_request in enumerate(asked):
        if adapter_request is not None:
            baseline, expected[index] = expected[index], _vector(adapted, texts[index])
            assert (baseline - expected[index]).abs().max() > 0.01
    for result, vector in zip(outputs, expected, strict=True):
        torch.testing.assert_close(
            torch.tensor(result.outputs.embedding), vector, rtol=1e-4, atol=1e-4
        )


def _vector(model: Any, tokens: list[int]) -> torch.Tensor:
    """The last token's hidden state, at length 1."""
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1]
    return torch.nn.functional.normalize(states[0, -1], dim=0)


RAW = PoolingParams(use_activation=False)
#: Of each family, as PEFT names them.
TARGETS = {
    "bert": ["query", "intermediate.dense", "output.dense"],
    "roberta": ["query", "key", "value"],
    "distilbert": ["q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"],
    "modernbert": ["Wqkv", "Wo", "Wi"],
    "qwen3": ["q_proj", "down_proj"],
}


def adapt(model: Path, folder: Path, auto: Any, targets: list[str], **options: Any) -> Path:
    """A random adapter as PEFT saves it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(target_modules=targets, init_lora_weights=False, r=4, **options)
    adapted = get_peft_model(auto.from_pretrained(model, dtype=torch.float32), config)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            full = "lora_A" not in name and "lora_B" not in name
            parameter.data += 0.3 * torch.randn_like(parameter) * (1.0 if full else 0.5)
    save(adapted, folder)
    return folder


def compare(model: Path, adapter: Path, auto: Any, pick: Any, **asked: Any) -> None:
    """Base and adapter in one batch, and the adapter alone, beside PEFT."""
    from peft import PeftModel

    request, value = LoRARequest("a", 1, str(adapter)), [*TEXTS, TEXTS[0]]
    who = [None, request, request, None, request]
    llm = LLM(str(model), max_num_seqs=8)

    def embed_texts(texts: list[str], adapters: list[LoRARequest | None]) -> list[Any]:
        return llm.encode(texts, RAW, use_tqdm=False, lora_request=adapters, **asked)

    together = embed_texts(value, who)
    (isolated_output,) = embed_texts(value[1:2], [request])
    torch.testing.assert_close(
        isolated_output.outputs.data, together[1].outputs.data, atol=1e-6, rtol=0
    )
    base = auto.from_pretrained(model, dtype=torch.float32).eval()
    assert not torch.allclose(together[0].outputs.data, together[4].outputs.data, atol=1e-2)
    for adapter_request in (None, request):
        if adapter_request is not None:
            base = PeftModel.from_pretrained(base, adapter).eval()
        for item, output in zip(who, together, strict=True):
            if item is adapter_request:
                with torch.no_grad():
                    values = pick(base(torch.tensor([output.prompt_token_ids])))[0]
                torch.testing.assert_close(output.outputs.data, values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in TARGETS if kind != "qwen3"])
def test_states_of_encoders_are_those_of_peft(tmp_path: Path, kind: str) -> None:
    model = make(kind, tmp_path / "model")
    options: dict[str, Any] = {"use_dora": True} if kind == "roberta" else {"lora_bias": True}
    if kind == "modernbert":  # its layers have no biases
        options = {}
    adapter = adapt(model, tmp_path / "adapter", AutoModel, TARGETS[kind], **options)
    compare(
        model,
        adapter,
        AutoModel,
        lambda output: output.last_hidden_state,
        pooling_task="token_embed",
    )
    verdict = check_adapter(str(model), adapter, probe=True)
    assert verdict.error is None
    assert verdict.probe is not None
    assert verdict.probe.max_difference < 1e-4


@pytest.mark.parametrize("kind", TARGETS)
def test_classifiers_that_an_adapter_brings_are_those_of_peft(tmp_path: Path, kind: str) -> None:
    auto = AutoModelForSequenceClassification
    model = make(kind, tmp_path / "model", "ForSequenceClassification", num_labels=3)
    adapter = adapt(model, tmp_path / "adapter", auto, TARGETS[kind][:2], task_type="SEQ_CLS")
    verdict = check_adapter(str(model), adapter, probe=True)
    assert verdict.error is None
    assert {"score", "classifier"} & set(verdict.target_modules)
    compare(model, adapter, auto, lambda output: output.logits)


#: Layers of heads, tables of words, and BERT's pooler, which is a part of its classifier alone.
OTHER_TARGETS = {
    "bert": ["query", "dense", "word_embeddings"],
    "roberta": ["query", "word_embeddings"],
    "distilbert": ["q_lin", "word_embeddings"],
    "modernbert": ["Wqkv", "dense", "tok_embeddings"],
}


@pytest.mark.parametrize("kind", OTHER_TARGETS)
def test_tables_and_layers_of_heads_are_those_of_peft(tmp_path: Path, kind: str) -> None:
    auto = AutoModelForSequenceClassification
    model = make(kind, tmp_path / "model", "ForSequenceClassification", num_labels=3)
    adapter = adapt(model, tmp_path / "adapter", auto, OTHER_TARGETS[kind], task_type="SEQ_CLS")
    verdict = check_adapter(str(model), adapter, probe=True)
    assert verdict.error is None
    assert "embedding" in verdict.target_modules
    compare(model, adapter, auto, lambda output: output.logits)


def test_a_pooler_that_nothing_is_pooled_by_changes_nothing(tmp_path: Path) -> None:
    model = make("bert", tmp_path / "model")
    adapter = adapt(model, tmp_path / "adapter", AutoModel, OTHER_TARGETS["bert"])
    compare(
        model,
        adapter,
        AutoModel,
        lambda output: output.last_hidden_state,
        pooling_task="token_embed",
    )


def test_a_head_of_other_labels_is_refused_by_name(tmp_path: Path) -> None:
    model = make("bert", tmp_path / "model", "ForSequenceClassification", num_labels=3)
    other = make("bert", tmp_path / "other", "ForSequenceClassification", num_labels=5)
    auto = AutoModelForSequenceClassification
    adapter = adapt(other, tmp_path / "adapter", auto, ["query"], task_type="SEQ_CLS")
    error = check_adapter(str(model), adapter).error
    assert error is not None
    assert "must be [3" in error["message"]
    vectors = make("bert", tmp_path / "vectors")
    error = check_adapter(str(vectors), adapter).error
    assert error is not None
    assert "belongs to no module" in error["message"]
