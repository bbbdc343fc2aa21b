"""Adapters whose files are laid out alike: what is packed at once is what is packed one by one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import LLM, LoRARequest
from engine.contract.errors import InvalidRequest
from engine.contract.lora import (
    WEIGHTS_FILE,
    AdapterRef,
    DigestCache,
    adapter_digest,
    file_fingerprints,
)
from engine.lora import store as store_module
from engine.lora.layer_delta import AdaptableModel
from engine.lora.packing import pack_adapter
from engine.lora.packing_template import _Files
from engine.lora.reader import read_adapter
from engine.lora.store import AdapterStore, StoreLimits
from engine.lora.target_modules import TargetModules
from engine.models.decoder import NativeDecoder
from engine.models.encoders.encoder import NativeEncoder
from kernels.lora import PackedLora

from .adapters import DEMO_MODEL, first_a, pirate, write_adapter
from .peft_oracle import checkpoint, make_adapter


def loaded(model: Path | str) -> AdaptableModel:
    llm = LLM(str(model), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=16)
    actual_model = llm.core.executor.worker.loaded.model  # type: ignore[attr-defined]
    assert isinstance(actual_model, NativeDecoder | NativeEncoder)
    return actual_model


@pytest.fixture(scope="module")
def demo() -> AdaptableModel:
    return loaded(DEMO_MODEL)


def ref(folder: Path) -> AdapterRef:
    return AdapterRef(digest=adapter_digest(folder), name=folder.name, path=str(folder))


def refuse(*args: Any) -> Any:
    raise AssertionError("the file was read tensor by tensor")


def added(model: AdaptableModel, lora: PackedLora) -> Tensor:
    """What rows get, by the kernels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, lora.in_features, generator=generator)
    y = torch.randn(3, lora.out_features, generator=generator)
    model.ops.add_lora(y, x, [(lora, torch.tensor([0, 2]))])
    return y


ATTENTION = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("recipe", "options", "alike"),
    [
        ("llama", {"target_modules": ATTENTION, "r": 5, "rank_pattern": {"v_proj": 3}}, True),
        ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}, True),
        ("llama", {"target_modules": ["q_proj"], "use_dora": True}, False),
        ("llama", {"target_modules": ["q_proj", "embed_tokens"]}, False),
        ("gpt_neox", {"target_modules": ["query_key_value"]}, False),  # its rows change places
        ("mixtral", {"target_modules": [], "target_parameters": ["experts.down_proj"]}, False),
    ],
)
def test_a_second_adapter_of_one_layout_is_the_same_either_way(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    options: dict[str, Any],
    alike: bool,
) -> None:
    folder = checkpoint(recipe, tmp_path / "model")
    model, store = loaded(folder), AdapterStore(StoreLimits())
    one, two = (make_adapter(folder, tmp_path / str(i), seed=i, **options) for i in range(2))
    store.load(ref(one), model)
    if not alike:
        store.load(ref(two), model)
        monkeypatch.setattr(store_module, "read_adapter", refuse)
        three = make_adapter(folder, tmp_path / "2", seed=2, **options)
        with pytest.raises(AssertionError, match="tensor by tensor"):
            store.load(ref(three), model)
        return
    with monkeypatch.context() as blind:
        blind.setattr(store_module, "read_adapter", refuse)
        facts = store.load(ref(two), model)
    result = store.device[ref(two).digest]
    expected_adapter = pack_adapter(read_adapter(two, TargetModules(model.spec)), model)
    assert facts.rank == store.load(ref(one), model).rank
    assert (result.table is None) == (expected_adapter.table is None)
    for layer, (ours, theirs) in enumerate(
        zip(result.layers, expected_adapter.layers, strict=True)
    ):
        assert ours.keys() == theirs.keys()
        for slot, lora in ours.items():
            assert (lora.rank, lora.in_features) == (theirs[slot].rank, theirs[slot].in_features)
            assert torch.equal(added(model, lora), added(model, theirs[slot])), (layer, slot)


def _nan(tensors: dict[str, Tensor]) -> None:
    tensors[first_a(tensors)][1, 1] = float("nan")


def _nothing(tensors: dict[str, Tensor]) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "digest", "words"),
    [(_nan, None, "holds NaN"), (_nothing, "0" * 64, "its files hold")],
)
def test_what_is_wrong_with_a_known_layout_is_still_refused_by_name(
    demo: AdaptableModel,
    tmp_path: Path,
    spoil: Callable[[Any], None],
    digest: str | None,
    words: str,
) -> None:
    store, (config, tensors) = AdapterStore(StoreLimits()), pirate()
    store.load(ref(write_adapter(tmp_path / "good", config, tensors)), demo)
    spoil(tensors)
    folder = write_adapter(tmp_path / "bad", config, tensors)
    adapter_ref = AdapterRef(digest=digest or adapter_digest(folder), path=str(folder))
    with pytest.raises(InvalidRequest, match=words):
        store.load(adapter_ref, demo)
    assert adapter_ref.digest not in store.device


def test_another_configuration_of_the_same_tensors_is_another_layout(
    demo: AdaptableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scale would be another one."""
    store, (config, tensors) = AdapterStore(StoreLimits()), pirate()
    store.load(ref(write_adapter(tmp_path / "one", config, tensors)), demo)
    louder = {**config, "lora_alpha": 2 * config["lora_alpha"]}
    monkeypatch.setattr(store_module, "read_adapter", refuse)
    with pytest.raises(AssertionError, match="tensor by tensor"):
        store.load(ref(write_adapter(tmp_path / "two", louder, tensors)), demo)


def test_a_tokenizer_beside_a_known_layout_is_in_the_digest_alone(
    demo: AdaptableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, (config, tensors) = AdapterStore(StoreLimits()), pirate()
    store.load(ref(write_adapter(tmp_path / "one", config, tensors)), demo)
    folder = write_adapter(tmp_path / "two", config, tensors)
    (folder / "added_tokens.json").write_text("{}")
    monkeypatch.setattr(store_module, "read_adapter", refuse)
    input_ref = ref(folder)
    store.load(input_ref, demo)
    assert input_ref.digest in store.device
    (folder / "added_tokens.json").write_text('{"<ahoy>": 1}')
    with pytest.raises(AssertionError, match="tensor by tensor"):  # it's another adapter now
        store.load(AdapterRef(digest="0" * 64, path=str(folder)), demo)


def test_a_truncated_file_of_a_known_layout_is_refused(
    demo: AdaptableModel, tmp_path: Path
) -> None:
    store, (config, tensors) = AdapterStore(StoreLimits()), pirate()
    folder = write_adapter(tmp_path / "one", config, tensors)
    input_ref = ref(folder)
    store.load(input_ref, demo)
    store.unload(input_ref.digest)
    store.clear_host()
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(InvalidRequest, match="valid safetensors file"):
        store.load(input_ref, demo)


def test_files_are_hashed_once_until_they_are_written(
    demo: AdaptableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their size and their dates say then."""
    monkeypatch.setattr("engine.contract.lora._TICK_S", -1.0)
    hashed: list[int] = []
    full = _Files.digest.fget
    assert full is not None

    def counted(files: _Files) -> str:
        hashed.append(len(files.weights))
        return str(full(files))

    monkeypatch.setattr(_Files, "digest", property(counted))
    store, (config, tensors) = AdapterStore(StoreLimits()), pirate()
    store.load(ref(write_adapter(tmp_path / "one", config, tensors)), demo)
    folder = write_adapter(tmp_path / "two", config, tensors)
    input_ref = LoRARequest("two", 1, str(folder)).ref()
    hashed.clear()
    for _ in range(2):
        store.load(input_ref, demo)
        store.unload(input_ref.digest)
        store.clear_host()
    assert hashed == []
    file = folder / WEIGHTS_FILE
    content, dates = bytearray(file.read_bytes()), file.stat()
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(dates.st_atime_ns, dates.st_mtime_ns))
    with pytest.raises(InvalidRequest, match="its files hold"):
        store.load(input_ref, demo)
    assert LoRARequest("two", 1, str(folder)).ref().digest != input_ref.digest


def test_files_that_were_written_just_now_are_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second write within one tick of the file system's clock leaves no trace."""
    path = write_adapter(tmp_path / "one", *pirate())
    digests, states = DigestCache(), file_fingerprints(path)
    for seconds, expected in ((3600.0, None), (-1.0, digests.of(path))):
        monkeypatch.setattr("engine.contract.lora._TICK_S", seconds)
        digests.of(path)
        assert digests.get_cached(path, states) == expected
