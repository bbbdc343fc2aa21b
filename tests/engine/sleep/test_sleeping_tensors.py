"""All tensors of a model are found, put away and brought back: on a CPU that plays the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.devices import offload as offload_module
from engine.devices.offload import HostCopy, iter_tensors
from tests.engine.models import Oracle, make_model
from tests.engine.pooling.models import make

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@dataclass(slots=True)
class Slots:
    tensor: torch.Tensor
    back: object = None


Slots.__module__ = "engine.test"


class Method:
    __module__ = "kernels.test"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def call(self) -> torch.Tensor:
        return self.tensor


def test_tensors_are_found_wherever_they_are_held() -> None:
    tensors = [torch.full((2,), float(n)) for n in range(8)]
    slots = Slots(tensors[0])
    slots.back = slots  # a circle
    root = [
        slots,
        Method(tensors[1]).call,
        functools.partial(Method(tensors[2]).call, tensors[3]),
        functools.partial(print, tensors[4], file=tensors[5]),
        {"a": {"b": (tensors[6],)}},
        torch.nn.ModuleList([torch.nn.Linear(1, 1)]),
        slots,
    ]
    actual_tensors = list(iter_tensors(root))
    values = {
        float(tensor[0]) for tensor in actual_tensors if tensor.dim() == 1 and len(tensor) == 2
    }
    assert values == {0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0}
    assert (
        len(actual_tensors) == len({id(tensor) for tensor in actual_tensors}) == 9
    )  # with the module's two


@pytest.mark.parametrize(
    ("kind", "head"), [("bert", "Model"), ("modernbert", "ForSequenceClassification"), ("", "")]
)
def test_no_closure_of_a_model_or_its_pooler_holds_a_tensor(
    kind: str, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoders, heads and bridged models don't name their tensors, as decoders do."""
    folder = make(kind, tmp_path, head) if kind else make_model("llama", tmp_path)
    impl = "auto" if kind else "transformers"
    llm = LLM(str(folder), dtype="float32", max_model_len=32, cpu_kernels=False, model_impl=impl)
    loaded = llm.core.executor.worker.loaded
    ids = {id(tensor) for tensor in iter_tensors([loaded.model, loaded.pooler])}
    inside = offload_module._reachable

    def with_closures(one: Any) -> list[Any]:
        cells = getattr(one, "__closure__", None) or ()
        return [cell.cell_contents for cell in cells] or inside(one)

    monkeypatch.setattr(offload_module, "_reachable", with_closures)
    assert {id(tensor) for tensor in iter_tensors([loaded.model, loaded.pooler])} == ids
    assert ids


def test_what_is_not_ours_is_not_searched() -> None:
    assert list(iter_tensors(SimpleNamespace(tensor=torch.ones(1)))) == []
    assert list(iter_tensors([torch, LLM, "text", 7, None])) == []


def test_views_stay_views_of_one_storage() -> None:
    base = torch.arange(12.0)
    parts = [base[:4], base[4:].view(2, 4), base]
    copy = HostCopy(iter(parts), CPU)
    assert copy.nbytes == 48
    assert base.untyped_storage().nbytes() == 0
    copy.restore()
    assert torch.equal(base, torch.arange(12.0))
    parts[0].fill_(-1)
    assert base[3] == -1
    assert parts[1][1, 3] == 11


class Pages:
    """Locks tensors' pages, up to `most` of them at once."""

    def __init__(self, max_locked: int = 100) -> None:
        self.locked: list[int] = []
        self.max_locked = max_locked

    def pin(self, tensor: torch.Tensor) -> Callable[[], None]:
        if len(self.locked) == self.max_locked:
            raise RuntimeError("out of locked memory")
        self.locked.append(tensor.data_ptr())
        return lambda: self.locked.remove(tensor.data_ptr())


def test_pages_are_locked_while_they_are_kept_and_no_longer() -> None:
    """However often: nothing is left over, and nothing is lost."""
    pages, tensors = Pages(), [torch.arange(8.0), torch.ones(3)]
    for _ in range(3):
        copy = HostCopy(iter(tensors), CPU, pages.pin)
        assert len(pages.locked) == 2
        copy.restore()
        assert pages.locked == []
        assert tensors[0].tolist() == list(range(8))


def test_pages_that_can_not_be_locked_are_kept_as_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pages, tensors = Pages(max_locked=1), [torch.full((4,), float(n)) for n in range(3)]
    copy = HostCopy(iter(tensors), CPU, pages.pin)
    assert len(pages.locked) == 1
    assert caplog.text.count("aren't locked") == 1
    copy.restore()
    assert pages.locked == []
    assert [float(tensor[0]) for tensor in tensors] == [0.0, 1.0, 2.0]


def test_weights_that_host_memory_does_not_take_stay_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages, tensors = Pages(), [torch.full((4,), float(n)) for n in range(3)]
    empty, calls = torch.empty, []

    def short(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError("none left")
        return empty(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", short)
        with pytest.raises(MemoryError):
            HostCopy(iter(tensors), CPU, pages.pin)
    assert pages.locked == []
    assert [float(tensor[0]) for tensor in tensors] == [0.0, 1.0, 2.0]


def test_a_deeper_sleep_gives_the_host_memory_of_a_lighter_one_back(tmp_path: Path) -> None:
    pages = Pages()
    llm = LLM(
        str(make_model("llama", tmp_path)), dtype="float32", num_gpu_blocks_override=32,
        max_model_len=64, cpu_kernels=False, enable_sleep_mode=True,
    )  # fmt: skip
    device, prompt = llm.core.executor.worker.device, [[5] * 20]
    expected = llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    def offload_to_host(tensors: Iterator[torch.Tensor]) -> HostCopy:
        allocated_tensors = list(tensors)
        for tensor in allocated_tensors:
            if not tensor.untyped_storage().resizable():  # of a mapped file
                tensor.data = tensor.data.clone()
        return HostCopy(iter(allocated_tensors), CPU, pages.pin)

    device.offload = offload_to_host
    num_locked = 0
    for levels in ([1], [1, 2], [1], [2]):
        for level in levels:
            llm.sleep(level)
            assert bool(pages.locked) == (level == 1)
            num_locked = num_locked or len(pages.locked)
            assert len(pages.locked) in (0, num_locked)
        llm.wake_up()
        assert pages.locked == []
        assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_memory_that_is_short_can_be_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.full((4,), float(n)) for n in range(3)]
    copy = HostCopy(iter(tensors), CPU)
    resize, calls = torch.UntypedStorage.resize_, []

    def short(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        calls.append(size)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("none left")
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", short)
    with pytest.raises(torch.OutOfMemoryError):
        copy.restore()
    copy.restore()
    assert [float(tensor[0]) for tensor in tensors] == [0.0, 1.0, 2.0]


FORMS = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "llama-rope3": {},
    "qwen2-window": {},
    "experts": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 24, "head_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize("impl", ["quire", "transformers"])
@pytest.mark.parametrize("form", FORMS)
def test_a_model_away_and_back_answers_the_same(form: str, impl: str, tmp_path: Path) -> None:
    """On the reference kernels, whose weights are plain tensors, as on a GPU."""
    family = "llama" if form == "experts" else form
    folder = make_model(family, tmp_path, num_hidden_layers=2, **FORMS[form])
    llm = LLM(
        str(folder), dtype="float32", num_gpu_blocks_override=32, max_model_len=64,
        cpu_kernels=False, model_impl=impl,
    )  # fmt: skip
    model = llm.core.executor.worker.loaded.model
    model.release_kv()
    for tensor in iter_tensors(model):
        if not tensor.untyped_storage().resizable():  # of a mapped file; on a GPU there are none
            tensor.data = tensor.data.clone()
    expected = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if impl == "quire":
        names, tensors = zip(*model.named_tensors(), strict=True)
        assert len(set(names)) == len(names)
        assert {id(tensor) for tensor in tensors} == {id(tensor) for tensor in iter_tensors(model)}
        assert "layers.1.attention.qkv.weight" in names
        copy = HostCopy(iter(tensors), CPU)
    else:
        copy = HostCopy(iter_tensors(model), CPU)
    # All of the checkpoint (its header aside) and the rotary tables.
    assert copy.nbytes >= expected - 16384
    for tensor in iter_tensors(model):
        assert tensor.untyped_storage().nbytes() == 0
    copy.restore()
    llm.core.executor.allocate_cache()
    prompts = [[5] * 20, [7, 8, 9]]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    oracle = Oracle(folder)
    assert [o.outputs[0].token_ids for o in outputs] == [oracle.greedy(p, 5) for p in prompts]
