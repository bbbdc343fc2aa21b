"""A device without a GPU: its tensors can't be looked at, only its kernels see what is in them.

Tensors that `send` brings to it, and all that is computed from them, are `OnDevice`. Whatever would
make the host wait for a real device (`item`, `tolist`, `cpu`, `nonzero`, a comparison that becomes
a bool, ...) raises `Waited`.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch.utils._pytree import register_dataclass, tree_map_only

import kernels
from engine import LLM
from engine.executor.worker import Worker
from engine.sampling.sampler import Sampler
from engine.worker.gpu import input_buffers
from engine.worker.gpu import model_runner as device_runner
from engine.worker.gpu.graphs import DeviceForward, PiecewiseAttention
from engine.worker.gpu.model_runner import GpuModelRunner, tapped
from kernels.attention_args import AttentionArgs
from kernels.reference.linear import ReferenceLinear

CPU = torch.device("cpu")
WAITS = {
    *("item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "argwhere"),
    *("__bool__", "__int__", "__float__", "__index__", "equal", "allclose"),
    *("is_nonzero", "repeat_interleave", "__contains__", "__repr__"),
}
KERNELS = (
    *("rms_norm", "fused_add_rms_norm", "rope_and_cache", "paged_attention", "silu_and_mul"),
    *("gelu_and_mul", "argmax", "sample"),
)


register_dataclass(AttentionArgs)  # so that its tensors are found


class Waited(Exception):
    """The host asked what a tensor of the device holds."""


class OnDevice(torch.Tensor):
    """A tensor of the device. Unless `strict`, it may be looked at."""

    strict = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if cls.strict and name in WAITS:
            raise Waited(name)
        if cls.strict and name in ("__getitem__", "__setitem__", "index_put_"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, torch.Tensor) and i.dtype == torch.bool for i in index):
                raise Waited(f"{name} by a mask")
        return super().__torch_function__(func, types, args, kwargs or {})


def on_device(values: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda x: x.as_subclass(OnDevice), values)


def seen(values: Any) -> Any:
    """As a kernel sees them: the same memory."""
    return tree_map_only(OnDevice, lambda x: x.as_subclass(torch.Tensor), values)


def kernel(run: Any) -> Any:
    def launch(*args: Any, **options: Any) -> Any:
        out = run(*seen(args), **seen(options))
        retained = (
            args[0].out if args and isinstance(args[0], AttentionArgs) else options.get("out")
        )
        return retained if retained is not None else on_device(out)

    return launch


class FakeDevice:
    """Notes what crosses between host and device.

    Attributes:
        sent: how many arrays each copy to the device held.
        events: ("launch" or "wait", number of the step), in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[int] = []
        self.events: list[tuple[str, int]] = []
        fake = self

        class FakeDownload:
            def __init__(self, tensors: Any, stream: Any) -> None:
                self.step = sum(kind == "launch" for kind, _ in fake.events)
                fake.events.append(("launch", self.step))
                # A copy of its own: later steps may reuse the device's memory.
                self.tensors = [seen(tensor).clone() for tensor in tensors]

            def wait(self) -> Any:
                fake.events.append(("wait", self.step))
                return self.tensors

        send_all = input_buffers.send

        def send(arrays: Any, device: Any) -> Any:
            self.sent.append(len(arrays))
            return on_device(send_all(arrays, device))

        def send_one(tensor: torch.Tensor, device: Any) -> Any:
            return on_device(tensor.clone())

        monkeypatch.setattr(device_runner, "Download", FakeDownload)
        monkeypatch.setattr(input_buffers, "send", send)
        monkeypatch.setattr("engine.sampling.metadata.to_device", send_one)
        monkeypatch.setattr(ReferenceLinear, "rows", lambda self, ids: self.weight[ids])
        ops = kernels.get("cpu", use_compiled=False)
        for name in KERNELS:
            if hasattr(ops, name):
                monkeypatch.setitem(vars(ops), name, kernel(getattr(ops, name)))
        self._patch = monkeypatch

    def runner(
        self, loaded: Any, batch: Any, masks: Any, *, split: bool = True, custom: Any = None,
        hidden: Any = None,
    ) -> GpuModelRunner:  # fmt: skip
        """Runs steps of a model on this device."""
        model = loaded.model
        ops = model.ops
        sampler = Sampler(loaded.eos_token_ids, ops, custom=custom)
        breaks = PiecewiseAttention(ops.paged_attention)
        self._patch.setitem(vars(ops), "paged_attention", breaks)
        batch.decodes_first = split
        slots = getattr(model, "lora_slots", None)
        run = tapped(model, () if hidden is None else hidden.aux_layers)
        forward = DeviceForward(run, CPU, breaks=breaks, slots=slots)
        runner = GpuModelRunner(model, batch, sampler, forward, CPU, masks, hidden)
        runner._sampled = on_device(runner._sampled)
        return runner

    def engine(
        self, folder: Any, *, inline: bool = True, split: bool = True, **settings: Any
    ) -> LLM:
        """An engine whose steps run on this device.

        inline: a step is launched where it is submitted, before the last one's tokens are taken.
        """

        def make_runner(worker: Worker, batch: Any) -> GpuModelRunner:
            custom = worker._logits_processors()
            return self.runner(worker.loaded, batch, worker._masks, split=split, custom=custom)

        self._patch.setattr(Worker, "_make_runner", make_runner)
        defaults = {
            "num_gpu_blocks_override": 64, "max_model_len": 128, "max_num_seqs": 8,
            "async_scheduling": True,
        }  # fmt: skip
        chosen = {**defaults, **settings}
        llm = LLM(str(folder), dtype="float32", cpu_kernels=False, **chosen)
        if inline and chosen["async_scheduling"]:
            llm.core.executor._thread = InlineThread()
        return llm


class InlineThread:
    """`StepThread` without a thread."""

    def submit(self, prepare: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(prepare()())
        except Exception as error:
            future.set_exception(error)
        return future

    def resume(self) -> None:
        pass
