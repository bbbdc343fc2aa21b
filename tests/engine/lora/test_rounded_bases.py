"""Adapters beside weights in few bits say what they say beside the same weights dequantized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import LLM
from engine.checkpoints.safetensors import WeightReader
from engine.contract.lora import AdapterRef
from engine.lora.merge import FloatWeights, merged_spec
from engine.lora.parity_probe import _run, prompts
from engine.lora.reader import read_adapter
from engine.lora.target_modules import TargetModules
from engine.models.decoder import NativeDecoder

from .peft_oracle import checkpoint, make_adapter
from .test_peft_equality import ALL


class Dequantized(WeightReader):
    """A checkpoint with the linear weights and tables that a loaded model has of it."""

    def __init__(self, folder: Path, model: NativeDecoder) -> None:
        super().__init__(folder)
        self._rows: dict[str, torch.Tensor] = {}
        names = model.spec.names
        self._rows[f"{names.embedding}.weight"] = _rows(model.embedding)
        self._rows[f"{names.lm_head}.weight"] = _rows(model.lm_head)
        for index, layer in enumerate(TargetModules(model.spec).layers):
            weights = model.lora_linears(index)
            for slot, linear in layer.items():
                parts = _rows(weights[slot]).split([part.rows for part in linear.parts])
                for part, rows in zip(linear.parts, parts, strict=True):
                    self._rows[f"{part.name}.weight"] = rows

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._rows[name] if name in self._rows else super().get(name, shape)


def _rows(layer: object) -> torch.Tensor:
    return layer.rows(torch.arange(layer.out_features))  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dora", [False, True])
def test_logits_are_those_of_the_dequantized_base(
    tmp_path: Path, quantization: str, dora: bool
) -> None:
    folder = checkpoint("llama", tmp_path / "model")
    adapter = make_adapter(folder, tmp_path / "adapter", target_modules=ALL, use_dora=dora)
    llm = LLM(str(folder), dtype="float32", skip_tokenizer_init=True, quantization=quantization)
    executor = llm.core.executor
    model = executor.worker.loaded.model  # type: ignore[attr-defined]
    read = read_adapter(adapter, TargetModules(model.spec))
    ref = AdapterRef(digest=read.digest, path=str(adapter))
    executor.adapters.load(ref)
    apart = executor.adapters.by_digest[ref.digest]  # type: ignore[attr-defined]
    merged = NativeDecoder(merged_spec(model.spec, read), model.ops, torch.float32, 64)
    merged.load(FloatWeights(Dequantized(folder, model), model.spec, read), lambda *_: None)
    merged.allocate_kv(4, 16, torch.float32)
    for prompt in prompts(model.spec.vocab_size):
        ours, theirs = _run(model, prompt, apart), _run(merged, prompt, None)
        base = _run(model, prompt, None)
        far = (base - theirs).abs().mean()
        # Activations of rounded layers are rounded too: near, and much nearer than the base.
        assert (ours - theirs).abs().mean() < 0.1 * far
