"""Rows of adapters on a device that is never waited for: their rows go over with the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kernels
from engine import LLM, LoRARequest, SamplingParams
from engine.devices.cpu import CpuDevice
from engine.models.lora import EmbeddingLora
from kernels.lora import (
    EMBEDDING,
    EmbeddingWeights,
    LayerLoras,
    LoraMapping,
    LoraSlice,
    LoraSlots,
    LoraTarget,
    LoraWeights,
    PackedLora,
    SlotTable,
    TorchLora,
)
from tests.engine.cuda.fake_device import FakeDevice, OnDevice, seen
from tests.engine.lora.peft_oracle import checkpoint, make_adapter, prompts

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OPS = kernels.get("cpu", use_compiled=False)
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)


class DenseEmbedding(PackedLora):
    """By what a CPU does."""

    nbytes = 0

    def __init__(self, value: EmbeddingWeights) -> None:
        outer = None
        if value.b is not None:
            rank = value.b.shape[1]
            parts = [LoraSlice(0, value.b, 0, value.scale)]
            weights = LoraWeights(a=torch.eye(rank), parts=parts, out_features=len(value.b))
            outer = OPS.pack_lora(weights)
        self.embedding = EmbeddingLora(
            table=value.table, tokens=value.tokens, inner=value.inner, outer=outer
        )


class DenseSlots(LoraSlots):
    """In torch; reads the rows as a kernel does."""

    def __init__(self, max_adapters: int) -> None:
        self.max_adapters = max_adapters
        self.layers: list[LayerLoras] = []
        self.calls = 0

    def tile(self, rows: int) -> int:
        return 4

    def pack(self, lora: LoraWeights) -> TorchLora:
        return TorchLora(lora, torch.device("cpu"))

    def pack_embedding(self, weights: EmbeddingWeights) -> dict[str, PackedLora]:
        return {EMBEDDING: DenseEmbedding(weights)}

    def embed(self, layer: int, x: Tensor, token_ids: Tensor, rows: LoraMapping) -> None:
        for lora, rows_of_adapter in self.owned((layer, EMBEDDING), rows):
            if isinstance(lora, DenseEmbedding):
                lora.embedding.change(OPS, seen(x), seen(token_ids), rows_of_adapter)

    def put(self, layers: LayerLoras) -> SlotTable:
        self.layers.append(layers)
        return SlotTable(len(self.layers) - 1, layers)

    def add(self, target: LoraTarget, y: Tensor, x: Tensor, rows: LoraMapping) -> None:
        self.calls += 1
        for lora, rows_of_adapter in self.owned(target, rows):
            if isinstance(lora, TorchLora):
                lora.add(seen(y), seen(x), rows_of_adapter)

    def slot_by_row(self, rows: LoraMapping, count: int) -> Tensor:
        raise NotImplementedError

    def add_experts(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError

    def add_expert(self, *args: Any) -> None:
        raise NotImplementedError

    def owned(
        self, target: LoraTarget, rows: LoraMapping
    ) -> Iterator[tuple[PackedLora | None, Tensor]]:
        order, owners = seen(rows.order).view(-1, rows.tile), seen(rows.owners)
        for tile in range(int(seen(rows.count))):
            tile_rows = order[tile]
            yield (
                self.layers[int(owners[tile])][target[0]].get(target[1]),
                tile_rows[tile_rows >= 0].long(),
            )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> DenseSlots:
    slots = DenseSlots(8)
    monkeypatch.setattr(
        CpuDevice, "prepare_adapters",
        lambda device, loaded: loaded.model.use_lora_slots(slots) or "",
    )  # fmt: skip
    return slots


def answers(llm: LLM, asked: Sequence[LoRARequest | None]) -> list[list[int]]:
    texts = [{"prompt_token_ids": prompt} for prompt in prompts(len(asked))]
    outputs = llm.generate(texts, PARAMS, use_tqdm=False, lora_request=list(asked))
    llm.core.check_integrity()
    return [output.outputs[0].token_ids for output in outputs]


def settings(**more: Any) -> dict[str, Any]:
    return {"skip_tokenizer_init": True, "max_num_batched_tokens": 16, **more}


def test_rows_of_adapters_and_of_none_have_the_cpus_tokens(
    model: Path, slots: DenseSlots, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Prompts come in chunks beside decodes, and nothing waits for the device."""
    folders = [
        make_adapter(model, tmp_path / "wide", seed=1, r=20, target_modules=ALL, use_dora=True),
        make_adapter(model, tmp_path / "narrow", seed=2, r=3, target_modules=["v_proj"]),
    ]
    one, two = (LoRARequest(f"a{i}", i + 1, str(folder)) for i, folder in enumerate(folders))
    asked = [None, one, two, one, None, two]
    with monkeypatch.context() as baseline:
        baseline.setattr(CpuDevice, "prepare_adapters", lambda device, loaded: "")
        expected = answers(LLM(str(model), dtype="float32", **settings()), asked)
    device = FakeDevice(monkeypatch)
    llm = device.engine(model, **settings())
    assert answers(llm, asked) == expected
    assert slots.calls
    assert len(device.sent) == sum(kind == "launch" for kind, _ in device.events)
    slots.calls = 0
    base = answers(llm, [None] * len(asked))
    assert (base[0], base[4]) == (expected[0], expected[4])
    assert slots.calls == 0  # steps without adapters launch nothing for them


def test_embeddings_and_output_layers_have_the_cpus_tokens(
    model: Path, slots: DenseSlots, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Low ranks, whole tables and single tokens' rows, beside rows of the base; nothing waits."""
    ways: list[dict[str, Any]] = [
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["o_proj"], "trainable_token_indices": list(range(4, 300))},
    ]
    folders = [make_adapter(model, tmp_path / f"{i}", seed=i, **way) for i, way in enumerate(ways)]
    asked = [
        None,
        *(LoRARequest(f"a{i}", i + 1, str(folder)) for i, folder in enumerate(folders)),
    ] * 2
    with monkeypatch.context() as baseline:
        baseline.setattr(CpuDevice, "prepare_adapters", lambda device, loaded: "")
        expected = answers(LLM(str(model), dtype="float32", **settings()), asked)
        base = answers(LLM(str(model), dtype="float32", **settings()), [None] * len(asked))
    assert all(
        one != other
        for one, other, has_adapter in zip(expected, base, asked, strict=True)
        if has_adapter
    )
    llm = FakeDevice(monkeypatch).engine(model, **settings())
    assert answers(llm, asked) == expected


@pytest.mark.parametrize("more", [4, -4])
def test_rows_of_adapters_that_bring_tokens_have_the_cpus(
    model: Path, slots: DenseSlots, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    caplog: pytest.LogCaptureFixture, more: int,
) -> None:  # fmt: skip
    """Beside rows of the base and of an adapter of its tokens, overlapped before and after."""
    ways: list[dict[str, Any]] = [
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "more_tokens": more},
        {
            "target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"],
            "more_tokens": 2 * more,
        },
    ]  # fmt: skip
    folders = [make_adapter(model, tmp_path / f"{i}", seed=i, **way) for i, way in enumerate(ways)]
    asked = [
        None,
        *(LoRARequest(f"a{i}", i + 1, str(folder)) for i, folder in enumerate(folders)),
    ] * 2
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts(len(asked))]
    for index in (3, 4, 8):
        inputs[index]["prompt_token_ids"].append(387 if more > 0 else 370)
    penalized = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=2,
        prompt_logprobs=1, repetition_penalty=1.2, logit_bias={max(383, 383 + more): 100.0},
    )  # fmt: skip
    kinds = [penalized if index in (3, 8) and more > 0 else PARAMS for index in range(len(asked))]

    def generate_tokens(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(inputs, kinds, use_tqdm=False, lora_request=asked)
        llm.core.check_integrity()
        return [result.outputs[0].token_ids for result in outputs]

    with monkeypatch.context() as baseline:
        baseline.setattr(CpuDevice, "prepare_adapters", lambda device, loaded: "")
        expected = generate_tokens(LLM(str(model), dtype="float32", **settings()))
    assert max(map(max, expected)) >= 384 or more < 0
    device = FakeDevice(monkeypatch)
    monkeypatch.setattr(OnDevice, "strict", False)  # such steps are looked at
    llm = device.engine(model, **settings())
    assert generate_tokens(llm) == expected
    assert generate_tokens(llm) == expected
    assert "failed" not in caplog.text


def test_rows_are_sorted_for_a_graph_of_more_tokens() -> None:
    order, owners, count = DenseSlots(3).sort(
        [(2, np.array([0, 1, 3, 6, 7])), (0, np.array([2]))], 10, padded=True
    )
    assert order[:12].tolist() == [0, 1, 3, 6, 7, -1, -1, -1, 2, -1, -1, -1]
    assert owners.tolist() == [2, 2, 0, -1, -1]
    assert count.tolist() == [3]
