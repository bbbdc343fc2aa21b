"""Rows of adapters on a device that is never waited for: their rows go over with the step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import LLM, LoRARequest, SamplingParams
from engine.contract.errors import InvalidRequest
from engine.devices.cpu import CpuDevice
from kernels.lora import LayerLoras, LoraWeights, TorchLora
from kernels.lora_slots import LoraRows, LoraSlots, Place, SlotTable
from tests.engine.cuda.fake_device import FakeDevice, seen
from tests.engine.lora.peft_oracle import checkpoint, make_adapter, prompts

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)


class PlainSlots(LoraSlots):
    """In torch; reads the rows as a kernel does."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.layers: list[LayerLoras] = []
        self.calls = 0

    def tile(self, rows: int) -> int:
        return 4

    def pack(self, lora: LoraWeights) -> TorchLora:
        return TorchLora(lora, torch.device("cpu"))

    def put(self, layers: LayerLoras) -> SlotTable:
        self.layers.append(layers)
        return SlotTable(len(self.layers) - 1, layers)

    def add(self, place: Place, y: Tensor, x: Tensor, rows: LoraRows) -> None:
        self.calls += 1
        order, owners = seen(rows.order).view(-1, rows.tile), seen(rows.owners)
        for tile in range(int(seen(rows.count))):
            lora = self.layers[int(owners[tile])][place[0]].get(place[1])
            if isinstance(lora, TorchLora):
                own = order[tile]
                lora.add(seen(y), seen(x), own[own >= 0].long())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> PlainSlots:
    made = PlainSlots(8)
    monkeypatch.setattr(
        CpuDevice, "prepare_adapters",
        lambda device, loaded: loaded.model.use_lora_slots(made) or "",
    )  # fmt: skip
    return made


def answers(llm: LLM, asked: Sequence[LoRARequest | None]) -> list[list[int]]:
    texts = [{"prompt_token_ids": prompt} for prompt in prompts(len(asked))]
    outputs = llm.generate(texts, PARAMS, use_tqdm=False, lora_request=list(asked))
    llm.core.check_integrity()
    return [output.outputs[0].token_ids for output in outputs]


def settings(**more: Any) -> dict[str, Any]:
    return {"skip_tokenizer_init": True, "max_num_batched_tokens": 16, **more}


def test_rows_of_adapters_and_of_none_have_the_cpus_tokens(
    model: Path, slots: PlainSlots, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Prompts come in chunks beside decodes, and nothing waits for the device."""
    folders = [
        make_adapter(model, tmp_path / "wide", seed=1, r=20, target_modules=ALL, use_dora=True),
        make_adapter(model, tmp_path / "narrow", seed=2, r=3, target_modules=["v_proj"]),
    ]
    one, two = (LoRARequest(f"a{i}", i + 1, str(each)) for i, each in enumerate(folders))
    asked = [None, one, two, one, None, two]
    with monkeypatch.context() as plain:
        plain.setattr(CpuDevice, "prepare_adapters", lambda device, loaded: "")
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


def test_what_slots_have_no_place_for_is_refused_by_name(
    model: Path, slots: PlainSlots, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    llm = FakeDevice(monkeypatch).engine(model, **settings())
    for module in ("embed_tokens", "lm_head"):
        folder = make_adapter(model, tmp_path / module, target_modules=["q_proj", module])
        with pytest.raises(InvalidRequest, match=rf"{module}.* aren't supported on a GPU"):
            answers(llm, [LoRARequest(module, 1, str(folder))])
    assert slots.layers == []


def test_rows_are_sorted_for_a_graph_of_more_tokens() -> None:
    order, owners, count = PlainSlots(3).sort(
        [(2, np.array([0, 1, 3, 6, 7])), (0, np.array([2]))], 10, padded=True
    )
    assert order[:12].tolist() == [0, 1, 3, 6, 7, -1, -1, -1, 2, -1, -1, -1]
    assert owners.tolist() == [2, 2, 0, -1, -1]
    assert count.tolist() == [3]
