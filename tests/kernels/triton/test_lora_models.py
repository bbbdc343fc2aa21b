"""Adapters of models by slots, in Triton's interpreter: what the CPU's kernels make of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

import kernels
from engine import LLM, LoRARequest, PoolingParams, SamplingParams
from engine.devices.cpu import CpuDevice
from engine.models.decoder import NativeDecoder
from engine.models.encoders.encoder import NativeEncoder
from engine.worker.gpu.input_buffers import stage_eager
from engine.worker.gpu.model_runner import LogitsLoraRows
from engine.worker.model_runner import StepLogits
from tests.engine.lora.peft_oracle import PeftOracle, checkpoint, make_adapter, prompts
from tests.engine.lora.test_experts import FAMILIES
from tests.engine.lora.test_pooling import OTHER_TARGETS, TARGETS, adapt
from tests.engine.pooling.models import TEXTS, make
from tests.kernels.triton.sizes import FEW_HEADS

CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
RAW = PoolingParams(use_activation=False)


@pytest.fixture
def by_slots(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """From now on models run as on a GPU: steps name slots. The slots that were made."""
    slots: list[Any] = []

    def prepare(device: Any, loaded: Any) -> str:
        slots.append(loaded.model.make_lora_slots(4, 16))
        loaded.model.use_lora_slots(slots[-1])
        return ""

    def staged(forward: Any) -> Any:
        def run(model: Any, token_ids: torch.Tensor, context: Any, *more: Any) -> Any:
            remote_context = stage_eager(token_ids, context, CPU, model.lora_slots).context
            lengths = context.query_start_loc
            remote_context = dataclasses.replace(remote_context, query_start_loc=lengths)
            return forward(model, token_ids, remote_context, *more)

        return run

    monkeypatch.setenv(kernels.FORCED, "triton")
    monkeypatch.setattr(CpuDevice, "prepare_adapters", prepare)
    for kind in (NativeDecoder, NativeEncoder):
        monkeypatch.setattr(kind, "forward", staged(kind.forward))
    return slots


def tokens(model: Path, adapter: Path) -> list[list[int]]:
    """Of the base and of the adapter in one batch."""
    request, texts = LoRARequest("a", 1, str(adapter)), prompts(4)
    llm = LLM(
        str(model), dtype="float32", num_gpu_blocks_override=40, max_model_len=64, device="cpu",
        skip_tokenizer_init=True,
    )  # fmt: skip
    outputs = llm.generate(
        [{"prompt_token_ids": text} for text in texts], PARAMS, use_tqdm=False,
        lora_request=[None, request, request, None],
    )  # fmt: skip
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_tokens_of_adapted_experts_are_the_cpus(
    tmp_path: Path, request: pytest.FixtureRequest, family: str
) -> None:
    """Stacked experts with one of all tokens, and experts that run one by one."""
    model = checkpoint(family, tmp_path / "model", **FEW_HEADS)
    adapter = make_adapter(model, tmp_path / "adapter", **FAMILIES[family])
    expected = tokens(model, adapter)
    slots = request.getfixturevalue("by_slots")
    assert tokens(model, adapter) == expected
    assert len(slots) == 1


def test_tokens_of_adapted_layers_with_states_are_the_cpus(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = checkpoint("lfm2", tmp_path / "model")
    targets = ["in_proj", "out_proj", "w1", "q_proj"]
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=targets)
    expected = tokens(model, adapter)
    request.getfixturevalue("by_slots")
    assert tokens(model, adapter) == expected


def test_tokens_that_an_adapter_brings_are_the_cpus(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read, added to and chosen by kernels, in rows whose logits are wider than others'."""
    model = checkpoint("llama", tmp_path / "model", **FEW_HEADS)
    targets = ["q_proj", "embed_tokens", "lm_head"]
    adapter = make_adapter(model, tmp_path / "adapter", more_tokens=4, target_modules=targets)
    pairs = [([5, 384, 17, 387], "a"), ([5, 9, 17], None)]
    expected = PeftOracle(model, {"a": adapter}, more_tokens=4).greedy_all(pairs, 2)
    request.getfixturevalue("by_slots")

    def adapted(logits: Any, hidden: torch.Tensor, heads: Any) -> Any:
        rows = LogitsLoraRows(logits._model, heads, len(hidden))
        return rows.logits(hidden, [torch.from_numpy(array) for array in rows.arrays])

    monkeypatch.setattr(StepLogits, "_adapted", adapted)
    llm = LLM(
        str(model), dtype="float32", num_gpu_blocks_override=40, max_model_len=64, device="cpu",
        skip_tokenizer_init=True,
    )  # fmt: skip
    adapter_request = LoRARequest("a", 1, str(adapter))
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in pairs], PARAMS, use_tqdm=False,
        lora_request=[adapter_request, None],
    )  # fmt: skip
    assert [output.outputs[0].token_ids for output in outputs] == expected


def pooled(model: Path, adapter: Path, **asked: Any) -> list[torch.Tensor]:
    request = LoRARequest("a", 1, str(adapter))
    llm = LLM(str(model), dtype="float32", max_num_seqs=8, device="cpu")
    adapter_requests = [None, request, request, None, request]
    token_ids = llm.encode(
        [*TEXTS, TEXTS[0]], RAW, use_tqdm=False, lora_request=adapter_requests, **asked
    )
    assert not torch.allclose(token_ids[0].outputs.data, token_ids[4].outputs.data, atol=1e-2)
    return [output.outputs.data for output in token_ids]


@pytest.mark.parametrize(
    ("kind", "labels", "targets"),
    [
        ("bert", 3, OTHER_TARGETS["bert"]),  # its words and its head too
        ("modernbert", 0, TARGETS["modernbert"]),
        ("qwen3", 3, TARGETS["qwen3"]),
    ],
)
def test_vectors_and_labels_are_the_cpus(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, labels: int, targets: list[str]
) -> None:
    """Of encoders, whose tokens change places within a step, and of decoders."""
    suffix = "ForSequenceClassification" if labels else ""
    auto: Any = AutoModelForSequenceClassification if labels else AutoModel
    options = {"task_type": "SEQ_CLS"} if labels else {}
    asked = {} if labels else {"pooling_task": "token_embed"}
    more = {"num_labels": labels} if labels else {}
    model = make(kind, tmp_path / "model", *([suffix] if suffix else []), **more)
    adapter = adapt(model, tmp_path / "adapter", auto, targets, **options)
    expected = pooled(model, adapter, **asked)
    slots = request.getfixturevalue("by_slots")
    for one, other in zip(pooled(model, adapter, **asked), expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)
    assert len(slots) == 1
